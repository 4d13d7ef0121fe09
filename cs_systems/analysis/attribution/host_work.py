"""Kinds of work of the host, by the names of functions and ranges: a checkpoint, a log, a compilation.

A remedy must be right for any loop: it may assume that work prepares data only if the name says so.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class HostWork(NamedTuple):
    """Kind of work: the words that complete "the host …", and the remedy.

    is_replaced: the remedy takes another operator, so that the time without this work bounds nothing.
    """

    words: str
    remedy: str
    is_replaced: bool = False


COPIES_FIELDS = HostWork(
    "copies a dataclass with all that it holds",
    "use its fields as they are, such as vars(batch), or make the copy once if it does not change",
)
_BEGIN, _END = r"(?<![a-z])", r"(?![a-z])"  # limits of a word inside a name, as in `save_checkpoint`
_LOG = re.compile(r"(\w+)(?:\([^()]*\))?\.log$")
_LOGGERS = re.compile(  # owners of a method `log` that writes one; of others it is the logarithm
    r"^(self|cls)$|logg(er|ing)|(^|_)(logs?|run|module|metrics?)$|writer|wandb|mlflow|comet|neptune|track|experiment|"
    "board|trainer|record|monitor|callback|accelerator|fabric|history",
    re.IGNORECASE,
)
_SINGLE = (
    "action|state|position|board|move|leaf|node|fitness|population|candidate|individual|genome|function|arg|argument|"
    "input|shape|config|sample"
)
# The first pattern that matches a name (without its file and line) gives the kind.
_KINDS = {
    r"\bgc\.collect|built-in function collect\b|, collect$|" + _BEGIN + "gc_collect": HostWork(
        "collects garbage", "leave out gc.collect(), or call it every 100th step"
    ),
    r"\blinalg\.(p?inv|svd|svdvals|eigh?|eigvalsh?|matrix_exp|qr|lu)\b|\btorch\.(p?inverse|svd|qr)\b": HostWork(
        "decomposes matrices", "do it once where a matrix stays the same; solve() in place of an inverse"
    ),
    r"\b(cuda|mps|xpu|accelerator)\.(memory\.)?empty_cache\b": HostWork(
        "gives the device's memory back",
        "do not call torch.cuda.empty_cache() in the loop: the next step asks for it again",
    ),
    r"dynamo|inductor|compile_fx|^_compile\.|triton\S*compile|convert_frame": HostWork(
        "compiles",
        "let torch.compile see the same shapes in each step: pad them, or mark them (mark_dynamic, dynamic=True)",
    ),
    r"\b(im(age|g)|pic(ture)?|photo|grid|canvas|frame)s?\d*\.save\b|\bsave_image\b|\bim(write|save)\b": HostWork(
        "writes pictures", "write fewer or smaller ones, or write them in another thread"
    ),
    _BEGIN + r"sav(e|ing)_?(checkpoint|ckpt|model|pretrained|state)|checkpoint_?sav(e|ing)|write_checkpoint|torch\.save"
    r"|\bsave\b": HostWork("writes a checkpoint", "save less often, or in another thread"),
    r"\bplt\b|pyplot|savefig|\bimshow\b|seaborn|plotly|" + _BEGIN + f"plot{_END}|" + _BEGIN + r"draw_\w*"
    f"(fig(ure)?|plot|curve|chart|heatmap|histogram)s?{_END}": HostWork("draws figures", "log figures less often"),
    r"wandb|tensorboard|mlflow|\binfo\b|"
    + _BEGIN
    + r"add_(scalar|histogram|figure|image)|(?<![a-z_])_?log(ging|_(metric|dict|scalar|stat)s?)?"
    + r"(?![a-z_])": HostWork("writes a log", "log less often"),
    _BEGIN + r"(load|next|fetch|get|read|prepare)_?(batch|data)" + _END: HostWork(
        "loads the next batch", "load it in a data loader's workers (num_workers, prefetch_factor), or in advance"
    ),
    # not of one state or candidate, as in a search, nor of arguments
    _BEGIN + f"(evaluate|evaluation|validate|validation){_END}(?!_({_SINGLE})s?{_END})": HostWork(
        "evaluates", "evaluate less often or on fewer batches"
    ),
    r"subprocess\.|\bPopen\b|\bcheck_(output|call)\b|os\.(system|popen)\b": HostWork(
        "starts other programs", "start them less often, or do their work in this process"
    ),
    r"\b(or)?json\.dumps?\b|yaml\.\w*dump|csv\.\w*writer|\bwriterows?\b|\bto_(csv|json)\b|savetxt": HostWork(
        "writes values as text", "log fewer values, or log less often"
    ),
    r"\bfsync\b|\bflush\b|\bwrite(lines|_text|_bytes)?\b|np\.savez?\b|pickle\.dump\b|\bto_(parquet|pickle)\b": HostWork(
        "writes a file", "write it less often or in another thread, and flush it at the end"
    ),
    r"tqdm|set_(postfix|description)(_str)?\b|\bpbar\b": HostWork(
        "updates a progress bar", "update it less often (mininterval, miniters)"
    ),
    r"sklearn|torchmetrics|\b\w+_score\b|confusion_matrix|roc_curve|classification_report|"
    + _BEGIN
    + r"(metrics?|accuracy|stats|confusion|perplexity|bleu)"
    + _END: HostWork("computes metrics", "compute them less often, or by a few operators on whole tensors"),
    r"(?<![\w.])(dataclasses\.)?(asdict|astuple)\b": COPIES_FIELDS,
    r"\bdeepcopy\b": HostWork("copies objects", "copy values into tensors that exist (Tensor.copy_, load_state_dict)"),
    r"\bnp\.histogram\w*|\bhistc\b": HostWork("makes histograms", "make them less often"),
    r"requests\.(get|post|put|request)\b|urlopen|urllib|httpx|aiohttp|boto3": HostWork(
        "waits for a server", "fetch in advance, or send from another thread"
    ),
    r"[Tt]oken(ize|ise)r?\b|encode_(plus|batch)\b|batch_encode": HostWork(
        "tokenizes text", "tokenize it once, in advance"
    ),
    r"Image\.open\b|\bim(read|decode)\b|decode_(image|jpeg|png)\b|\bread_image\b": HostWork(
        "decodes images", "decode them in a data loader's workers (num_workers), or store them decoded"
    ),
    r"\bpd\.|pandas|DataFrame": HostWork(
        "fills a pandas table", "keep the values in a list, and make the table after the loop"
    ),
    r"hashlib|\b(sha\d+|md5|blake2[bs]|crc32)\b|hexdigest|\.digest\b": HostWork(
        "computes checksums", "compute them less often, or of a few values"
    ),
    r"sqlite3|\b(conn|connection|cursor|cur|db|session)\.(commit|execute(many)?)\b": HostWork(
        "uses a database", "keep one connection open, and commit many rows at once"
    ),
    r"\bprint\b": HostWork("prints", "print less often"),
    r"\bsleep\b": HostWork("sleeps", "remove the pause"),
    r"\b(item|tolist|cpu)\b": HostWork("reads values of tensors", "read values less often"),
}
# The same for operators of PyTorch that may take long before they launch a kernel.
_OPERATORS = {
    "aten::_cudnn_attention_forward": HostWork(
        "lets cuDNN prepare attention for sizes that are new to it",
        "use another kernel of scaled_dot_product_attention (torch.backends.cuda.enable_cudnn_sdp(False)), or pad the "
        "lengths, so that few sizes recur",
        is_replaced=True,  # on one H200 a generation took 49 to 55 ms a token, and 6.5 with another kernel
    )
}


def operator_work(name: str) -> HostWork | None:
    """Return what the host does for long in an operator; None if it usually only launches kernels."""
    return _OPERATORS.get(name)


@functools.lru_cache(maxsize=4096)
def host_work(name: str) -> HostWork | None:
    """Return the kind of work of a function or range, such as `save_checkpoint() at train.py:140`; None if unknown.

    A known operator may follow it: `forward, aten::_cudnn_attention_forward`.
    """
    if work := operator_work(name.rpartition(", ")[2]):
        return work
    own = re.sub(r" at \S+:\d+|\S+\.py:\d+", "", name)
    if (found := _LOG.search(own)) and not _LOGGERS.search(found[1]):
        return None
    return next((work for pattern, work in _KINDS.items() if re.search(pattern, own)), None)
