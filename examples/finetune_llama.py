"""Fine-tune Llama, Mistral or Qwen2 from a Hugging Face folder on a JSONL file, all of it or by LoRA.

    python examples/finetune_llama.py --model FOLDER --train data.jsonl --deepspeed examples/ds_config_auto.json
    python examples/finetune_llama.py --model FOLDER --train data.jsonl --lora-rank 8
    python examples/finetune_llama.py --tiny --train data.jsonl        # a small new model on bytes, on any machine

Data: one JSON object a line; see tokens.py. Leaves under ``--out``: checkpoint-N, trainer_state.json, loss.png, and
``model``, which transformers loads; with LoRA the adapters are merged into it, and also lie alone in ``adapter``.
Run it again with ``--resume`` to go on. GPUs are used where JAX finds them; otherwise ``--devices`` CPU devices
are simulated. On several hosts start it once a host, with ``--distributed``.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys

import jax
import llama
import lora
import tokens
from devices import request_devices
from flax import nnx

import zeroj as zj

HERE = pathlib.Path(__file__).parent
TINY = llama.LlamaConfig(
    vocab_size=tokens.Bytes.vocab_size,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=pathlib.Path, help="a folder with config.json and safetensors")
    source.add_argument("--tiny", action="store_true", help="a small new model that reads bytes")
    add("--train", type=pathlib.Path, required=True, help="a JSONL file")
    add("--eval", type=pathlib.Path, help="a JSONL file; left out, a tenth of --train is held back")
    add("--deepspeed", type=pathlib.Path, default=HERE / "ds_config_auto.json", help="a ds_config.json")
    add("--out", type=pathlib.Path, default=pathlib.Path("out/finetune"))
    add("--max-length", type=int, default=512, help="tokens; longer texts are cut off")
    add("--batch", type=int, default=1, help="examples of one device in one micro-batch")
    add("--accumulation", type=int, default=1, help="micro-batches of one update")
    add("--epochs", type=float, default=3.0)
    add("--max-steps", type=int, default=-1)
    add("--learning-rate", type=float, default=2e-5, help="LoRA wants about ten times as much")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="what is computed in")
    add("--lora-rank", type=int, default=0, help="0 trains all params")
    add("--lora-alpha", type=float, default=16.0)
    add("--lora-targets", nargs="+", default=["q_proj", "v_proj"], choices=llama.PROJECTIONS)
    add("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    add("--scan", action="store_true", help="run the layers as one stack: one of them is compiled")
    add("--save-steps", type=int, default=100)
    add("--resume", action="store_true", help="go on from the newest checkpoint under --out")
    add("--prompt", help="what to continue at the end; left out, the beginning of the first held back text")
    add("--devices", type=int, default=8, help="CPU devices to simulate where there is no accelerator")
    add("--distributed", action="store_true", help="jax.distributed.initialize(), one process a host")
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> llama.Llama:
    """The folder's model with its params on disk, or a small new one."""
    adapters = {
        "lora_rank": args.lora_rank,
        "lora_alpha": args.lora_alpha,
        "lora_targets": tuple(args.lora_targets),
        "scan": args.scan,
    }
    if args.tiny:
        return llama.Llama(dataclasses.replace(TINY, **adapters), nnx.Rngs(0))
    return llama.from_pretrained(args.model, dtype="float32", **adapters)


def make_data(args: argparse.Namespace, tokenizer: object) -> tuple[list, list]:
    """Examples to train on and to evaluate on."""
    train = tokens.read_jsonl(args.train, tokenizer, args.max_length)
    if args.eval is not None:
        return train, tokens.read_jsonl(args.eval, tokenizer, args.max_length)
    held = max(1, len(train) // 10)
    return train[:-held] or train, train[-held:]


def make_trainer(args: argparse.Namespace) -> tuple[zj.Trainer, object]:
    """The Trainer and the tokenizer."""
    tokenizer = tokens.Bytes() if args.tiny else tokens.tokenizer_of(args.model)
    train, held = make_data(args, tokenizer)
    training = zj.TrainingArguments(
        str(args.out),
        deepspeed=str(args.deepspeed),
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        warmup_ratio=0.03,
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        gradient_checkpointing=args.checkpointing,
        logging_steps=5,
        logging_first_step=True,
        eval_strategy="epoch",
        save_steps=args.save_steps,
        save_total_limit=2,
    )
    trainer = zj.Trainer(
        make_model(args),
        training,
        train_dataset=train,
        eval_dataset=held,
        processing_class=tokenizer,
        trainable=lora.is_adapter if args.lora_rank else None,
    )
    return trainer, tokenizer


def main() -> int:
    """Train, save, and show a sample."""
    args = parse_args()
    if args.distributed:
        jax.distributed.initialize()
    else:
        request_devices(args.devices)
    trainer, tokenizer = make_trainer(args)
    output = trainer.train(resume_from_checkpoint=args.resume)
    trainer.log_metrics("train", output.metrics)
    if args.lora_rank:
        lora.save_adapter(trainer, args.out / "adapter", str(args.model or ""))
        lora.merge(trainer)
    files = trainer.save_model(args.out / "model", only=lambda path: not lora.is_adapter(path, None))
    start = tokens.question(args.prompt, trainer.eval_dataset[0], tokenizer)
    text = trainer.generate([start], max_new_tokens=48, eos_token_id=tokenizer.eos)[0]
    if trainer.is_world_process_zero():
        print(f"sample: {tokenizer.decode(start)!r} -> {tokenizer.decode(text[len(start) :])!r}")
        print(f"saved {', '.join(str(file) for file in files)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except zj.ZerojError as error:
        sys.exit(f"{type(error).__name__}: {error}")
