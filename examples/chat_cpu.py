"""Chat with an INT4 checkpoint on a CPU: python examples/chat_cpu.py MODEL

MODEL is a folder or a hub id, in any format that w4plugin reads. Needs: pip install 'w4plugin[transformers]'
Ctrl-D ends the conversation.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoTokenizer, TextStreamer

import w4plugin.runtime.transformers as w4
from w4plugin.errors import W4Error


def main(model_name: str, max_new_tokens: int = 256) -> None:
    try:
        model = w4.from_pretrained(model_name, dtype=torch.bfloat16, device_map="cpu")
    except W4Error as error:
        raise SystemExit(str(error)) from error
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not said.strip():  # nothing to go on with
            continue
        messages.append({"role": "user", "content": said})
        if tokenizer.chat_template:
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:  # a base model goes on with what it is given
            inputs = tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
        prompt = inputs["input_ids"].shape[1]
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=streamer,
        )
        messages.append({"role": "assistant", "content": tokenizer.decode(out[0, prompt:], skip_special_tokens=True)})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
