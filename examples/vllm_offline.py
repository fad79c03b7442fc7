"""Generate with vLLM from an INT4 checkpoint that vLLM alone would refuse or misread.

    pip install w4plugin vllm
    python examples/vllm_offline.py MODEL

MODEL is a folder or a hub id. Nothing here names the plugin: vLLM finds it, and it takes the checkpoint if vLLM cannot
serve it rightly. ``quantization="w4plugin"`` would take any INT4 checkpoint.
"""

import sys

from vllm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "To bake bread you need"]


def main(model: str) -> None:
    llm = LLM(model, max_model_len=128)
    print("served by", llm.llm_engine.vllm_config.model_config.quantization)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16)):
        print(repr(output.prompt), "->", repr(output.outputs[0].text))


if __name__ == "__main__":
    main(sys.argv[1])
