"""Errors for options that a command does not have, with suggestions of similar options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from itertools import takewhile

from cs_systems.cli._options import described, named_option
from cs_systems.config import ConfigError
from cs_systems.core.plugins import is_foreign
from cs_systems.core.validation import option

# Words with the same meaning in options of this and other programs; the first word stands for all.
_SYNONYMS = (
    ("context", "seq", "sequence", "seqlen", "ctx"),
    ("length", "len"),
    ("heads", "head"),
    ("layers", "layer"),
    ("num", "n"),
    ("d", "dim"),
    ("precision", "dtype", "dtypes"),
    ("attention", "attn"),
    ("steps", "iters", "iterations"),
    ("out", "output"),
    ("world", "nproc", "gpus", "ranks"),
    ("size", "model", "preset"),
)
_WORDS = {word: same[0] for same in _SYNONYMS for word in same}
# Words that identify no option by themselves: --step-size does not mean --size.
_GENERAL = {"d", "length", "num", "size"}
_TYPING_ERROR, _SIMILAR = 0.8, 0.65  # smallest similarity of two option names, from 0 to 1


def refuse_unknown(words: Sequence[str], kind: type, command: str) -> None:
    """Raise ConfigError for the first word before `--` that looks like an option but is not one of the command's.

    The parser itself would list every unknown word, also the words of a script, and suggest only options with almost
    the same spelling.
    """
    options = [each for each in described(kind) if not each.is_positional]
    known = [name for each in options for name in each.names]
    repeated = {name for each in options if each.takes == "one each time" for name in each.names}
    before = [*takewhile(lambda word: word != "--", words)]
    for previous, word, following in zip(["", *before], before, [*before[1:], ""], strict=False):
        name = named_option(word)
        if not name or name in (*known, "help"):
            continue
        typed = word.partition("=")[0]
        near = likely(name, known)
        remedy = f"write {' or '.join(map(option, near))}" if near else f"see {command} --help"
        if name == "model" and "workload" in known and is_foreign(following):
            remedy = f"write --workload {following}"
        if hasattr(kind, "script"):
            remedy = remedy if near else "leave it out"
            remedy += f", or, if {typed} is an option of the script, write it after -- and the script's name"
        elif named_option(previous) in repeated:
            remedy = f"write {previous}={word} if it is the value of {previous}"
        raise ConfigError(f"unknown option {typed}; {remedy}")


def likely(name: str, known: Collection[str]) -> list[str]:
    """Return up to two known options that `name` probably means; all names are without leading dashes.

    Options with synonymous words come first, such as `context-length` for `seq_len`; then typing errors, options with
    some of the words, and options with a similar spelling.
    """
    name = name.lower()
    words = _meanings(name)
    alike = {each: SequenceMatcher(None, name, each).ratio() for each in known}
    shared = {each: words & _meanings(each) for each in known}
    found = (
        [each for each in known if _meanings(each) == words],
        [each for each in known if alike[each] >= _TYPING_ERROR],
        [each for each in known if shared[each] - _GENERAL and shared[each] in (words, _meanings(each))],
        [each for each in known if alike[each] >= _SIMILAR],
    )
    return sorted(next(filter(None, found), []), key=lambda each: -alike[each])[:2]


def _meanings(name: str) -> set[str]:
    return {_WORDS.get(word, word) for word in name.split("-")}
