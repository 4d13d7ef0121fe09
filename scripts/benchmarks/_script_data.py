"""Generated data for the public scripts of advised_scripts.toml, in the places where they read it.

Text, tokens and images are random, and so are the weights of BERT. Made are 4M tokens for nanoGPT,
120,000 sentences for nanochat, and 10,240 training images in 16 classes, far less than usual data sets. Tokenizers are
trained on such text; BERT's has at most 2,000 words, next to a vocabulary of 28,996 in the model. The pairs of
sentences are as many as in MRPC, and BERT is as large as the real one. With `tiny`, all of this is smaller.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

LETTERS = "etaoinshrdlucmfw"
METRIC = '''"""Accuracy, under the name of the metric that the script loads."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(predictions)}
'''
GLUE = "---\nconfigs:\n- config_name: mrpc\n  data_files:\n"


def prepare(root: Path, folders: Iterable[str], *, tiny: bool = False) -> None:
    """Write the data of the scripts in these folders below `root`."""
    for folder in dict.fromkeys(folders):
        PREPARED[folder](root, tiny)


def tokens(root: Path, tiny: bool) -> None:
    """Write tokens for nanoGPT's train.py, as its prepare.py files do."""
    import numpy as np

    folder = root / "nanoGPT" / "data" / "random"
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", 20_000 if tiny else 4_000_000), ("val", 20_000 if tiny else 200_000)):
        # the square makes some tokens more common than others, so that there is something to learn
        (50_257 * generator.random(count) ** 2).astype(np.uint16).tofile(folder / f"{name}.bin")


def text(root: Path, tiny: bool) -> None:
    """Write the text of minGPT's chargpt.py, with the letters of its prompt."""
    written = "\n".join(_sentences(500 if tiny else 20_000))
    (root / "minGPT" / "input.txt").write_text(f"O God, O God!\n{written}\n")


def documents(root: Path, tiny: bool) -> None:
    """Write documents for nanochat, and let its own script make the tokenizer; an empty module stands for wandb."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (root / "stand_ins").mkdir(exist_ok=True)
    (root / "stand_ins" / "wandb.py").touch()
    folder = root / "nanochat_base" / "base_data_climbmix"
    folder.mkdir(parents=True, exist_ok=True)
    sentences = _sentences(3_000 if tiny else 120_000, words=40_000)
    lines = [" ".join(sentences[start : start + 30]) for start in range(0, len(sentences), 30)]
    for shard, part in enumerate((lines[:-50], lines[-50:])):
        pq.write_table(pa.table({"text": part}), folder / f"shard_{shard:05d}.parquet", row_group_size=50)
    os.environ["NANOCHAT_BASE_DIR"] = str(root / "nanochat_base")
    size = "512" if tiny else "32768"
    with _started_in(root / "nanochat", "tok_train.py", "--vocab-size", size, "--max-chars", "4000000"):
        runpy.run_path("scripts/tok_train.py", run_name="__main__")


def pairs(root: Path, tiny: bool) -> None:
    """Write pairs of sentences, a metric, a tokenizer and a random BERT for Accelerate's nlp_example.py."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = root / "accelerate" / "examples"
    place = folder / "nyu-mll" / "glue"
    place.mkdir(parents=True, exist_ok=True)
    (folder / "glue").mkdir(exist_ok=True)
    (folder / "glue" / "glue.py").write_text(METRIC)
    files = ""
    for split, count in (("train", 256 if tiny else 3_668), ("validation", 64 if tiny else 408)):
        first, second = _sentences(count, 1), _sentences(count, 2)
        rows = [
            {"sentence1": a, "sentence2": b, "label": len(a) % 2, "idx": i}
            for i, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        (place / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
    (place / "README.md").write_text(f"{GLUE}{files}---\n")
    tokenizer = BertWordPieceTokenizer(lowercase=False)
    tokenizer.train_from_iterator(_sentences(2_000), vocab_size=2_000, show_progress=False)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, model_max_length=512, model_input_names=inputs, **names
    )
    wrapped.save_pretrained(folder / "bert-base-cased")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(vocab_size=28_996, **(small if tiny else {}))
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")


def images(root: Path, tiny: bool) -> None:
    """Write JPEG files in one folder per class, for timm's train.py and DCGAN."""
    folder = root / ("images_tiny" if tiny else "images")
    if folder.exists():
        return
    unfinished = root / f"{folder.name}_unfinished"
    if unfinished.exists():
        shutil.rmtree(unfinished)
    classes, train, validation = (4, 24, 4) if tiny else (16, 640, 16)
    jobs = [
        (unfinished / split / f"class{kind:02d}", [number, kind], count)
        for number, (split, count) in enumerate((("train", train), ("val", validation)))
        for kind in range(classes)
    ]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_write_images, distinct=32), *zip(*jobs, strict=True)))
    unfinished.rename(folder)


def _write_images(folder: Path, seed: list[int], count: int, distinct: int) -> None:
    """Write images of 256 × 256 points: coarse noise with the class's mean, as smooth as photographs.

    seed: the number of the split, and of the class.
    """
    import io

    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    generator, (_, kind) = np.random.default_rng(seed), seed
    made = []
    for _ in range(min(distinct, count)):
        coarse = generator.integers(0, 128, (32, 32, 3), dtype=np.uint8) + np.uint8(8 * kind)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        made.append(buffer.getvalue())
    for number in range(count):
        (folder / f"{number:04d}.jpg").write_bytes(made[number % len(made)])


def _sentences(count: int, seed: int = 0, words: int = 5_000) -> list[str]:
    """Return sentences of about 22 words, as long as MRPC's; common words come often."""
    generator = random.Random(seed)
    known = _words(words)
    weights = [1 / (rank + 1) for rank in range(words)]
    lengths = [generator.randint(14, 30) for _ in range(count)]
    drawn = iter(generator.choices(known, weights, k=sum(lengths)))
    return [" ".join(next(drawn) for _ in range(length)) for length in lengths]


def _words(count: int) -> list[str]:
    generator = random.Random(7)
    return ["".join(generator.choices(LETTERS, k=generator.randint(2, 9))) for _ in range(count)]


@contextmanager
def _started_in(folder: Path, *words: str) -> Iterator[None]:
    """Let a script run in its folder with these arguments, and with the modules of the folder."""
    here, arguments = Path.cwd(), sys.argv
    os.chdir(folder)
    sys.argv = [*words]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(here)
        sys.argv = arguments
        sys.path.remove(str(folder))


PREPARED: dict[str, Callable[[Path, bool], None]] = {
    "nanoGPT": tokens,
    "minGPT": text,
    "nanochat": documents,
    "accelerate/examples": pairs,
    "pytorch-image-models": images,
    "examples/dcgan": images,
}
