"""transformers' Trainer with an evaluation after every fifth step."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CASE = {
    "truth": "The Trainer evaluates on 160 samples after every fifth step, which takes longer than the five steps.",
    "cause": "evaluation",
    "also": ["periodic-pause"],
    "never": ["start-up", "data-loading", "small-operators"],
    "healthy": False,
}

torch.manual_seed(0)
config = GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
rows = [{"input_ids": (ids := torch.randint(0, 300, (32,))), "labels": ids} for _ in range(400)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=30,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    Trainer(model, arguments, train_dataset=rows[:240], eval_dataset=rows[240:]).train()
