"""Data flow in a loop's source code: finds lines that compute inputs of the model.

Names are followed backwards, from the arguments of the model's call through the assignments of its function, and of the
functions around it. A line feeds the model if it assigns such a name, adds to such a container, yields to a loop over
it, or is inside the call. No code is run; unreadable source feeds nothing.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cs_systems.measure.recorder.stacks import CLOCKS, Line, callee_of, position_of

# most calls of one line without gradients per backward pass, as of several teachers; more are a rollout or a generation
MOST_TEACHERS = 8
# methods that add to a container, besides methods that end with "_"
FILLS = {"append", "appendleft", "extend", "insert"}
LONGEST_LOOK = 40  # most characters of a condition in a sentence
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Inner = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Span(NamedTuple):
    """Range of an instruction in its source: first line and column, last line and column."""

    begin: tuple[int, int]
    end: tuple[int, int]

    def contains(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


class ModelCalls:
    """Calls of the models in some steps, by the own lines around them.

    Attributes:
        chains: for each place that calls a model, the program's own lines, outermost first, and whether autograd
            records it.
    """

    def __init__(self) -> None:
        self.chains: dict[tuple[Line, ...], bool] = {}
        self._without_gradients = Counter[tuple[Line, ...]]()
        self._passes = 0
        self._known: dict[tuple[Line, ...], bool] = {}
        self._backward: set[tuple[Line, ...]] = set()
        self._of_loss: dict[tuple[Line, ...], bool] = {}

    def add(self, chain: tuple[Line, ...], has_gradients: bool) -> None:
        self.chains[chain] = self.chains.get(chain, False) or has_gradients
        self._without_gradients[chain] += not has_gradients
        self._known.clear()

    def clear(self) -> None:
        for each in (self.chains, self._known, self._backward, self._of_loss, self._without_gradients):
            each.clear()
        self._passes = 0

    def add_backward(self, chain: tuple[Line, ...]) -> None:
        """Note the own lines around a backward pass."""
        self._backward.add(chain)
        self._passes += 1
        self._of_loss.clear()

    def are_made_by(self, line: Line) -> bool:
        """Return whether a line itself calls a model or a backward pass."""
        return any(chain[-1:] == (line,) for chain in (*self.chains, *self._backward))

    def go_into_loss(self, chain: tuple[Line, ...]) -> bool:
        """Return whether the innermost line makes what the loss is computed from, such as the outputs of a teacher.

        Many calls in one pass, such as those that generate a text token by token, are no teacher's.
        """
        if self._without_gradients[chain] > MOST_TEACHERS * self._passes:
            return False
        if chain not in self._of_loss:
            self._of_loss[chain] = any(_goes_into(chain, backward) for backward in self._backward)
        return self._of_loss[chain]

    def are_fed_by(self, chain: tuple[Line, ...]) -> bool:
        """Return whether the line makes an input of a training call, and neither calls a model nor uses its result."""
        if chain not in self._known:
            self._known[chain] = self._is_fed_by(chain)
        return self._known[chain]

    def _is_fed_by(self, chain: tuple[Line, ...]) -> bool:
        trains = any(self.chains.values())
        for call, has_gradients in self.chains.items():
            depth = _parting(chain, call)
            if has_gradients != trains or depth is None:
                continue
            # the line itself calls a model, such as a rollout
            if any(other[: depth + 1] == chain[: depth + 1] for other in self.chains):
                continue
            if feeds(chain[depth], call[depth:]):
                return self.polled(chain[-1]) is not None or not self._uses_results(chain[depth])
        return False

    def polled(self, line: Line) -> str | None:
        """Return what a loop around a sleep looks at, such as `replies.empty()`; None if it looks at nothing.

        A loop around a call of a model is the training, and one that looks at a clock waits for a point in time.
        """
        around = _polling(line)
        if around is None or any(
            each[0] is line[0] and (at := _located(each)) is not None and _span(around.loop).contains(at.span)
            for chain in self.chains
            for each in chain
        ):
            return None
        return around.condition

    def _uses_results(self, line: Line) -> bool:
        """Return whether a line uses what a model returned, as a step of an environment does by its action."""
        here, code = _located(line), line[0]
        calls = {each for chain in self.chains for each in chain if each[0] is code}
        results = {name for each in calls if (at := _located(each)) is not None for name in _made(at)}
        return here is not None and bool(_closure(here.scope, _used(here)) & (results - {"_"}))


class _Polling(NamedTuple):
    """Loop that sleeps between two looks at something, and the look in its source."""

    loop: ast.While
    condition: str


@functools.lru_cache(maxsize=256)
def _polling(line: Line) -> _Polling | None:
    here, tree = _located(line), _tree(line[0].co_filename)
    if here is None or tree is None or (callee_of(line) or "").rpartition(".")[2] != "sleep":
        return None
    around = [
        node for node in _around(tree, here.span) if isinstance(node, ast.For | ast.AsyncFor | ast.While | _Scope)
    ]
    loop = around[-1] if around else None
    if not isinstance(loop, ast.While):
        return None
    looks = [loop.test, *(node.test for node in _statements(loop) if isinstance(node, ast.If) and _ends_loop(node))]
    looks += [node.value for node in _statements(loop) if isinstance(node, ast.Return) and node.value is not None]
    for look in looks:
        calls = [ast.unparse(node.func) for node in ast.walk(look) if isinstance(node, ast.Call)]
        if calls and CLOCKS.isdisjoint(calls):
            text = ast.unparse(look)
            return _Polling(loop, text if len(text) <= LONGEST_LOOK else "a condition")
    return None


def _ends_loop(node: ast.If) -> bool:
    return any(isinstance(each, ast.Break | ast.Return) for each in _statements(node))


def _goes_into(chain: Sequence[Line], backward: Sequence[Line]) -> bool:
    depth = _parting(chain, backward)
    if depth is None or not feeds(chain[depth], backward[depth:], owner=True):
        return False
    return all(_is_returned(line) for line in chain[depth + 1 :])


def _is_returned(line: Line) -> bool:
    """Return whether a line makes what its function returns."""
    here = _located(line)
    if here is None:
        return False
    returned = [node.value for node in _statements(here.scope) if isinstance(node, ast.Return) and node.value]
    if any(_span(value).contains(here.span) for value in returned):
        return True
    return bool(_made(here) & _closure(here.scope, set[str]().union(*map(_names, returned))))


def _parting(chain: Sequence[Line], call: Sequence[Line]) -> int | None:
    """Return the depth of the first frame in which two stacks differ; None if they share no frame."""
    for depth, (here, there) in enumerate(zip(chain, call, strict=False)):
        if here[0] is not there[0]:
            return None
        if here[1] != there[1]:
            return depth
    return None


def feeds(line: Line, call: Sequence[Line], *, owner: bool = False) -> bool:
    """Return whether a line makes an input of a call.

    call: the lines that lead to the call; the first is in the same frame as `line`. owner: what owns the called method
    is an input too, as `loss` of `loss.backward()`.
    """
    here, *outer = (_located(each) for each in (line, *call))
    if here is None or None in outer:
        return False
    needed = _names(outer[-1].owner) if owner and outer[-1] is not None else set[str]()
    inner: _Located | None = None
    for each in (each for each in reversed(outer) if each is not None):
        if inner is not None and inner.scope is not each.scope:  # names that are local to the inner function end there
            needed = {name for name in needed if "." in name or name in inner.names}
        needed = _outside(each.loops, needed.union(*map(_names, each.arguments)))
        needed, inner = _closure(each.scope, needed), each
    first = outer[0]
    if first is not None and any(_span(argument).contains(here.span) for argument in first.arguments):
        return True
    return bool(needed & _made(here) - _imported(line[0].co_filename))


class _Located(NamedTuple):
    """Instruction in its source: its range, the arguments if it is a call, its statement, and the function around it.

    owner: what owns the called method. names: the names that its code looks up outside of the function. loops: the
    loops of the comprehensions around it, the innermost first.
    """

    span: Span
    arguments: list[ast.expr]
    owner: ast.expr | None
    statement: ast.stmt | None
    scope: _Scope
    names: frozenset[str]
    loops: tuple[ast.comprehension, ...]


@functools.lru_cache(maxsize=256)
def _located(line: Line) -> _Located | None:
    code, tree = line[0], _tree(line[0].co_filename)
    first, last, begin, end = position_of(line)
    if tree is None or first is None or last is None or begin is None or end is None:
        return None
    span = Span((first, begin), (last, end))
    around = [*_around(tree, span)]
    statement = next((node for node in reversed(around) if isinstance(node, ast.stmt)), None)
    scope: _Scope = next((node for node in reversed(around) if isinstance(node, _Scope)), tree)
    call = next((node for node in around if isinstance(node, ast.Call) and _span(node) == span), None)
    arguments = [*call.args, *(each.value for each in call.keywords)] if call else []
    owner = call.func.value if call and isinstance(call.func, ast.Attribute) else None
    loops = [loop for node in around if isinstance(node, _Comprehension) for loop in node.generators]
    names = frozenset((*code.co_names, *code.co_freevars))
    return _Located(span, arguments, owner, statement, scope, names, (*reversed(loops),))


@functools.lru_cache(maxsize=32)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=32)
def _imported(file: str) -> set[str]:
    """Return the names that a file imports; methods of modules do not add to a container."""
    tree = _tree(file)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)) if tree else ()
    return {(each.asname or each.name).partition(".")[0] for node in imports for each in node.names}


def _around(node: ast.AST, span: Span) -> Iterator[ast.AST]:
    """Yield the syntax nodes that contain a range, outermost first."""
    yield node
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "lineno"):
            if _span(child).contains(span):
                yield from _around(child, span)
        elif any(True for _ in _located_children(child, span)):
            yield from _around(child, span)


def _located_children(node: ast.AST, span: Span) -> Iterator[ast.AST]:
    return (each for each in ast.walk(node) if hasattr(each, "lineno") and _span(each).contains(span))


def _span(node: ast.AST) -> Span:
    place: ast.expr = node  # type: ignore[assignment]
    return Span((place.lineno, place.col_offset), (place.end_lineno or place.lineno, place.end_col_offset or 0))


def _names(node: ast.AST | None) -> set[str]:
    """Return the names in an expression: `batch`, and of attributes of self `self.batch`.

    Names of a comprehension's own items end with it.
    """
    match node:
        case None:
            return set()
        case ast.Attribute(value=ast.Name(id="self")):
            return {f"self.{node.attr}"}
        case ast.Name():
            return {node.id} - {"self"}
    found = set[str]().union(*map(_names, ast.iter_child_nodes(node)))
    return _outside(node.generators[::-1], found) if isinstance(node, _Comprehension) else found


def _outside(loops: Sequence[ast.comprehension], names: set[str]) -> set[str]:
    """Return names in a comprehension without its items, and with the names that they come from.

    loops: the loops of the comprehension, the innermost first.
    """
    for loop in loops:
        items = _bases(loop.target)
        names = names - items | (_names(loop.iter) if names & items else set())
    return names


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own body, without the nodes of functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _Inner):
            yield child
            yield from _statements(child)


def _closure(scope: ast.AST, names: set[str]) -> set[str]:
    """Return the names from which these names are computed in a scope."""
    flows = [(_targets(node), _names(_value(node))) for node in _statements(scope) if _value(node) is not None]
    flows += _written_items(scope)
    needed = {*names}
    while more := {name for made, used in flows if made & needed for name in used} - needed:
        needed |= more
    return needed


def _written_items(scope: ast.AST) -> list[tuple[set[str], set[str]]]:
    """Return the containers with the items of a loop over them that its body writes to: `rows` with `row`."""
    written = {
        name
        for node in _statements(scope)
        for target in (node.targets if isinstance(node, ast.Assign) else ())
        if isinstance(target, ast.Subscript)
        for name in _bases(target)
    }
    flows: list[tuple[set[str], set[str]]] = []
    for loop in (node for node in _statements(scope) if isinstance(node, ast.For | ast.AsyncFor)):
        targets, values = [loop.target], [loop.iter]
        match loop:
            case ast.For(target=ast.Tuple(elts=each), iter=ast.Call(func=ast.Name(id="zip"), args=of)) if len(
                each
            ) == len(of):
                targets, values = each, of
        flows += [
            (_names(value), items)
            for target, value in zip(targets, values, strict=True)
            if (items := _bases(target) & written)
        ]
    return flows


def _value(node: ast.AST) -> ast.expr | None:
    """Return the expression from which a statement makes values of names."""
    match node:
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr():
            return node.value
        case ast.For() | ast.AsyncFor():
            return node.iter
        case ast.withitem():
            return node.context_expr
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name)) as call) if name in FILLS or name.endswith("_"):
            return call
    return None


def _targets(node: ast.AST) -> set[str]:
    """Return the names that a statement assigns, or of containers that it adds to."""
    match node:
        case ast.Assign(targets=targets):
            return set[str]().union(*map(_bases, targets))
        case ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr() | ast.For() | ast.AsyncFor():
            return _bases(node.target)
        case ast.withitem(optional_vars=ast.expr() as target):
            return _bases(target)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner))):
            return _bases(owner)
    return set()


def _bases(target: ast.expr) -> set[str]:
    """Return the names of targets, without names in an index: `rows` for `rows[i]`."""
    match target:
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            return set[str]().union(*map(_bases, targets))
        case ast.Subscript(value=owner) | ast.Starred(value=owner):
            return _bases(owner)
    return _names(target)


def _used(here: _Located) -> set[str]:
    """Return the names that this instruction uses: those of its arguments if it is a call, else of its statement."""
    if here.arguments or here.owner is not None:
        used = _names(here.owner).union(*map(_names, here.arguments))
    else:
        used = _names(_value(here.statement) if here.statement is not None else None)
    return _outside(here.loops, used)


def _made(here: _Located) -> set[str]:
    """Return the names that the statement of this instruction assigns from its result."""
    statement = here.statement
    if statement is None:
        return set()
    parts = [statement, *(_statements(statement) if isinstance(statement, ast.With | ast.AsyncWith) else ())]
    if isinstance(statement, ast.For | ast.AsyncFor) and _span(statement) == here.span:  # the loop takes the next item
        return _targets(statement)
    values = [(part, _value(part)) for part in parts]
    return {
        name
        for part, value in values
        if value is not None and _span(value).contains(here.span)
        for name in _targets(part)
    }
