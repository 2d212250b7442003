"""Peer of step_vs_trl.py: one GRPO step of TRL per line on stdin, always from step-0 weights.

Runs in a virtual environment of its own. TRL's GRPOTrainer drives; a callback waits before
each step for a line, and puts the adapter and the optimiser back to their first state after
it, so that every timed step trains the same policy on the prompts that it is told to use.

Takes: a JSON line {"model", "prompts", "group", "max_new", "threads", "micro", "cache"} as
argument, then lines "step" or "stop". Gives: a JSON line per step: seconds in all and in
generation, reward, mean length, peak memory.
"""

import json
import os
import re
import resource
import sys
import tempfile
import time

setting = json.loads(sys.argv[1])
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(setting["threads"])
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

rows = setting["prompts"]  # one list of {"messages", "answer"} per step
flat = [{"prompt": row["messages"], "answer": row["answer"]} for step in rows for row in step]
num_steps, num_prompts, group = len(rows), len(rows[0]), setting["group"]


def reward(completions, answer, **_):
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", completion[0]["content"].replace(",", ""))
        scores.append(1.0 if numbers and numbers[-1] == expected else 0.0)
    return scores


seconds = {"generation": 0.0}


class Timed(GRPOTrainer):
    def _generate(self, *args, **kwargs):
        start = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        seconds["generation"] += time.perf_counter() - start
        return result


def say(**values):
    print("TRL " + json.dumps(values), flush=True)


class StepOnCommand(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **_):
        self.first = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        say(ready=True)

    def on_step_begin(self, args, state, control, **_):
        if sys.stdin.readline().strip() != "step":
            os._exit(0)
        seconds["generation"] = 0.0
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        self.elapsed = time.perf_counter() - self.start
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in self.first:
                    parameter.copy_(self.first[name])
        for values in optimizer.state.values():
            for value in values.values():
                if torch.is_tensor(value):
                    value.zero_()

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in (logs or {}):
            say(
                step_s=self.elapsed,
                generation_s=seconds["generation"],
                reward=logs["reward"],
                mean_tokens=logs.get("completions/mean_length"),
                peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            )


tokenizer = AutoTokenizer.from_pretrained(setting["model"])
model = AutoModelForCausalLM.from_pretrained(setting["model"], dtype=torch.bfloat16)
batch = num_prompts * group
config = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    bf16=False,
    fp16=False,
    seed=0,
    per_device_train_batch_size=setting["micro"],
    gradient_accumulation_steps=batch // setting["micro"],
    num_generations=group,
    max_completion_length=setting["max_new"],
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    learning_rate=3e-4,
    lr_scheduler_type="constant",
    warmup_steps=0,
    max_steps=num_steps,
    beta=0.0,
    num_iterations=1,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    gradient_checkpointing=False,
    dataloader_num_workers=0,
    dataloader_pin_memory=False,
    shuffle_dataset=False,
    disable_tqdm=True,
    **({"cache_implementation": setting["cache"]} if setting["cache"] else {}),
)
Timed(
    model=model,
    reward_funcs=reward,
    args=config,
    train_dataset=Dataset.from_list(flat),
    processing_class=tokenizer,
    callbacks=[StepOnCommand()],
    peft_config=LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    ),
).train()
