"""Observer of a script's process without code of the package: its state at exit, and clocks placed by hand.

public_scripts.py copies this file as sitecustomize.py into a folder at the front of PYTHONPATH. Nothing happens before
the script imports torch. OBSERVE holds, as JSON: `out`, the folder for one file of each process that trained; `clocks`,
functions such as "model:GPT.forward" by phase; `deterministic`.
"""

import atexit
import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pickle
import random
import sys
import time
from pathlib import Path

_CLOCKS = {
    "input": ["torch.utils.data.dataloader:_BaseDataLoaderIter.__next__"],
    "backward": ["torch:Tensor.backward", "torch.autograd:grad"],
}
_HOOKED = ("torch.nn:Module.__call__", "torch.autograd:_engine_run_backward", "torch:Tensor.to", "torch:Tensor.item",
           "torch:Tensor.copy_", "torch.nn.utils.clip_grad:_get_total_norm", "torch.optim:Optimizer.zero_grad",
           "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__", "torch.cuda:synchronize")  # fmt: skip


def _resolve(place):
    """Return the owner and the name of a function such as "torch:Tensor.backward"."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = sys.modules.get(module) or importlib.import_module(module)
    return functools.reduce(getattr, owners, owner), name


class _Clocks:
    """Time of each phase in each step. A step ends where the first optimizer that stepped steps again.

    A phase inside another interrupts it; whatever runs inside of backward belongs to backward.
    """

    def __init__(self, places):
        self.places = places
        self.steps, self.phases, self.open = [], {}, []
        self.first, self.since = None, time.perf_counter()

    def place(self):
        """Replace the functions, once the script has defined them: when its first optimizer is built."""
        for phase, places in self.places.items():
            for place in places:
                owner, name = _resolve(place)
                setattr(owner, name, self.timed(phase, getattr(owner, name)))
        self.places = {}

    def timed(self, phase, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if "backward" in self.open:
                return function(*args, **kwargs)
            self.switch()
            self.open.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.open.pop()
                if phase == "optimizer" and phase not in self.open:  # a subclass calls its parent's step
                    self.stepped(args[0])

        return call

    def switch(self):
        """Add the time until now to the open phase."""
        if sys.modules["torch"].cuda.is_initialized():
            sys.modules["torch"].cuda.synchronize()
        now = time.perf_counter()
        if self.open:
            self.phases[self.open[-1]] = self.phases.get(self.open[-1], 0.0) + now - self.since
        self.phases["step"] = self.phases.get("step", 0.0) + now - self.since
        self.since = now

    def stepped(self, optimizer):
        self.first = self.first or optimizer
        if optimizer is self.first:
            self.steps.append(self.phases)
            self.phases = {}


class _Observer:
    def __init__(self, torch, options):
        self.torch, self.out = torch, options["out"]
        self.modules, self.optimizers = [], []
        self.found = {place: _identity(place) for place in _HOOKED}
        self.clocks = _Clocks({**_CLOCKS, **options["clocks"]}) if "clocks" in options else None
        self.timed = set()  # optimizer classes with timed steps
        random.seed(0)
        torch.manual_seed(0)
        with contextlib.suppress(ImportError):  # here, because a later import would seed itself
            importlib.import_module("numpy").random.seed(0)
        if options.get("deterministic"):
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.keep(torch.nn.Module, self.modules)
        self.keep(torch.optim.Optimizer, self.optimizers)
        atexit.register(self.write)

    def keep(self, owner, kept):
        """Keep each object of the class, so that its state can be read at exit."""
        init = owner.__init__

        @functools.wraps(init)
        def built(this, *args, **kwargs):
            init(this, *args, **kwargs)
            kept.append(this)
            if self.clocks and owner is self.torch.optim.Optimizer:
                self.clocks.place()
                if type(this) not in self.timed:
                    self.timed.add(type(this))
                    type(this).step = self.clocks.timed("optimizer", type(this).step)

        owner.__init__ = built

    def write(self):
        gc.unfreeze()  # gc.get_objects leaves out objects that a script has frozen with gc.freeze
        gc.collect()
        alive = [each for each in gc.get_objects() if issubclass(type(each), self.torch.nn.Module)]
        modules = {id(each): each for each in [*self.modules, *alive] if "_parameters" in vars(each)}.values()
        parameters = _once(p for m in modules for p in m._parameters.values())
        tensors = _once([*parameters, *(b for m in modules for b in m._buffers.values())])
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not self.optimizers and not gradients:
            return
        state = {
            "parameters": self.digest(tensors),
            "gradients": self.digest(gradients),
            "optimizers": self.digest([each for o in self.optimizers for each in _leaves(getattr(o, "state", {}))]),
            "random": self.random_state(),
            "modes": sorted(
                {
                    f"{type(m).__qualname__} {m.training}"
                    for m in modules
                    if any(p is not None for p in m._parameters.values())
                }
            ),
            "counters": _counters(),
            "hooks": sorted(place for place in _HOOKED if _identity(place) != self.found[place]),
        }
        steps = self.clocks.steps if self.clocks else None
        record = {"tensors": len(tensors), "state": state, "steps": steps}
        rank = os.environ.get("RANK", "0")
        Path(self.out, f"rank{rank}-{os.getpid()}.json").write_text(json.dumps(record))

    def digest(self, values):
        """Return a checksum of a set of tensors and numbers that does not depend on their order."""
        torch = self.torch
        found = []
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_meta or value.layout != torch.strided:
                    continue
                value = value.detach().cpu().contiguous()
                raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
                text = f"{value.dtype} {tuple(value.shape)}".encode() + raw
            else:
                text = repr(value).encode()
            found.append(hashlib.sha256(text).hexdigest())
        return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()[:16]

    def random_state(self):
        torch, hash_of = self.torch, lambda raw: hashlib.sha256(raw).hexdigest()[:16]
        state = {"python": hash_of(pickle.dumps(random.getstate()))}
        if numpy := sys.modules.get("numpy"):
            state["numpy"] = hash_of(pickle.dumps(numpy.random.get_state()))
        state["torch"] = hash_of(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = hash_of(b"".join(each.cpu().numpy().tobytes() for each in torch.cuda.get_rng_state_all()))
        return state


def _once(values):
    """Return each tensor once, without None."""
    return list({id(each): each for each in values if each is not None}.values())


def _leaves(value):
    """Return the tensors and numbers of an optimizer's state."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [] if callable(value) else [value]


def _identity(place):
    owner, name = _resolve(place)
    return id(vars(owner).get(name))


def _counters():
    """Return torch.compile's counters: frames, unique graphs and graph breaks with their places."""
    utils = sys.modules.get("torch._dynamo.utils")
    counted = utils.counters if utils else {}
    groups = {name: dict(counted.get(name, {})) for name in ("frames", "stats", "graph_break")}
    return {name: group for name, group in groups.items() if group}


class _AtImportOfTorch:
    """Import finder that leaves finding torch to other finders, and begins to observe once torch is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        here = sys.meta_path.index(self)
        del sys.meta_path[here]
        try:
            found = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(here, self)
        if found is None:
            return None
        execute = found.loader.exec_module

        def executed(module):
            execute(module)
            sys.meta_path.remove(self)
            _Observer(module, json.loads(os.environ["OBSERVE"]))

        found.loader.exec_module = executed
        return found


def _next_sitecustomize():
    """Run the sitecustomize that this one hides."""
    here = Path(__file__).resolve().parent
    places = [place for place in sys.path if Path(place).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "OBSERVE" in os.environ:
    sys.meta_path.insert(0, _AtImportOfTorch())
    _next_sitecustomize()
