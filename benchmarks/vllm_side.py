"""vLLM's side of ``benchmarks.cpu_serve``, run by the interpreter that has vLLM: ``vllm_side.py MODEL DTYPE PP``.

Reads ``{"prompts": [[ids]], "num_tokens": n}`` lines, writes ``{"stagewire": {"seconds": s}}`` lines.
"""

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    path, dtype, num_ranks = sys.argv[1:]
    llm = LLM(
        model=path, dtype=dtype, pipeline_parallel_size=int(num_ranks), max_model_len=512, max_num_seqs=64,
        enable_prefix_caching=False, skip_tokenizer_init=True, gpu_memory_utilization=0.2,
    )  # fmt: skip
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=order["num_tokens"], ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in order["prompts"]], params, use_tqdm=False)
        say({"seconds": time.perf_counter() - started})


def say(what: dict[str, object]) -> None:
    print(json.dumps({"stagewire": what}), flush=True)


if __name__ == "__main__":
    main()
