"""transformers' Trainer on a small model without evaluation, saving or logging."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CASE = {
    "truth": "The Trainer trains a small GPT-2 whose forward and backward take most of each step; nothing else is large.",
    "cause": None,
    "also": ["small-operators"],
    "never": ["data-loading", "evaluation", "checkpoint-writing", "logging"],
    "healthy": True,
}

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=128, n_embd=128, n_layer=2, n_head=4))
rows = [{"input_ids": (ids := torch.randint(0, 500, (128,))), "labels": ids} for _ in range(240)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        max_steps=30,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    Trainer(model, arguments, train_dataset=rows).train()
