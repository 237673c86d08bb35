"""LLM, the vLLM-shaped face: a script written for vLLM runs after one changed import, and the answers are exact."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvboost import LLM, SamplingParams
from kvboost.api.llm import engine_options
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError, InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=12)

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]

VLLM_SCRIPT = """
from vllm import LLM, SamplingParams

prompts = {prompts!r}
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100)
if __name__ == "__main__":
    llm = LLM(model={model!r}, enforce_eager=True, gpu_memory_utilization=0.5)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print("PROMPT", repr(output.prompt), "TEXT", repr(output.outputs[0].text), len(output.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def tiny_opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of the make of facebook/opt-125m: its classes, special tokens and limits, random small weights."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([*PROMPTS, __doc__], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"
    )
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(fast), hidden_size=64, word_embed_proj_dim=64, ffn_dim=256, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=2048, init_std=0.2, bos_token_id=2, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("opt-tiny")
    OPTForCausalLM(config).save_pretrained(path)
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def opt(tiny_opt: Path) -> Iterator[LLM]:
    llm = LLM(model=str(tiny_opt), dtype="float32", max_num_seqs=8, block_size=16, num_gpu_blocks_override=64, seed=0)
    yield llm
    llm.kv.check()
    llm.close()


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    llm = LLM(model=str(smollm2_path), dtype="float32", kv_cache_memory_bytes=1 << 28, max_model_len=1024)
    yield llm
    llm.kv.check()
    llm.close()


def expected(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Greedy tokens from Transformers' own generate, the prompt left out."""
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count)
    return out[0, len(ids) :].tolist()


# -- vLLM's quickstart -------------------------------------------------------------------------------------------------


def test_a_vllm_script_runs_after_changing_one_import(tiny_opt: Path, tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    text = VLLM_SCRIPT.format(prompts=PROMPTS, model=str(tiny_opt))
    script.write_text(text.replace("from vllm import", "from kvboost import"))
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(src), "CI": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^PROMPT '(.*?)' TEXT (.+) (\d+)$", done.stdout, flags=re.M)
    assert [prompt for prompt, _, _ in found] == PROMPTS
    assert all(1 <= int(count) <= 100 for _, _, count in found) and sum(int(count) for _, _, count in found) > 20


def test_opt_answers_as_transformers_does(opt: LLM, tiny_opt: Path) -> None:
    reference = OPTForCausalLM.from_pretrained(tiny_opt).eval()
    outputs = opt.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    for text, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == text and output.prompt_token_ids == opt.get_tokenizer()(text)["input_ids"]
        assert output.outputs[0].token_ids == expected(reference, output.prompt_token_ids, 20)


# -- prompts and sampling parameters -----------------------------------------------------------------------------------


def test_every_form_of_a_prompt_means_the_same(opt: LLM) -> None:
    ids = opt.get_tokenizer()("Hello, my name is")["input_ids"]
    forms: list[Any] = ["Hello, my name is", {"prompt": "Hello, my name is"}, {"prompt_token_ids": ids}, ids]
    single = [opt.generate(form, GREEDY) for form in forms]
    assert all(len(outputs) == 1 for outputs in single)
    together = opt.generate(forms, GREEDY)
    by_keyword = opt.generate(prompt_token_ids=[ids], sampling_params=GREEDY)
    answers = {tuple(o.outputs[0].token_ids) for o in [*(outputs[0] for outputs in single), *together, *by_keyword]}
    assert len(answers) == 1
    assert [o.prompt for o in together] == ["Hello, my name is", "Hello, my name is", None, None]
    request_ids = [o.request_id for o in [*together, *by_keyword]]
    assert len(set(request_ids)) == 5 and all(isinstance(i, str) for i in request_ids)


def test_one_sampling_params_for_each_prompt(opt: LLM) -> None:
    listed = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1, max_tokens=5, n=2, seed=7, ignore_eos=True),
    ]
    short, sampled = opt.generate(["Hello", "The"], listed)
    assert [len(c.token_ids) for c in short.outputs] == [3]
    assert [(c.index, len(c.token_ids), c.finish_reason) for c in sampled.outputs] == [
        (0, 5, "length"),
        (1, 5, "length"),
    ]
    assert sampled.outputs[0].token_ids != sampled.outputs[1].token_ids
    assert [c.token_ids for c in opt.generate("The", listed[1])[0].outputs] == [c.token_ids for c in sampled.outputs]


def test_outputs_have_vllms_fields(opt: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [output] = opt.generate("The capital of France is", params)
    [completion] = output.outputs
    assert output.finished and completion.finished() and completion.stop_reason is None
    assert completion.logprobs is not None and len(completion.logprobs) == 4
    chosen = [row[token] for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert all(entry.rank == 1 for entry in chosen), "greedy takes the likeliest"
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert 0 <= output.metrics.time_in_queue <= output.metrics.first_token_latency <= output.metrics.total_latency
    assert output.metrics.num_generation_tokens == 4


def test_cache_salts_share_nothing(opt: LLM) -> None:
    ids = [(7 * i) % 200 + 10 for i in range(70)]
    opt.reset_prefix_cache()
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "b", "a")]
    first = opt.generate(prompts, GREEDY)
    assert len({tuple(o.outputs[0].token_ids) for o in first}) == 1
    assert first[1].num_cached_tokens == 0
    again = opt.generate([prompts[0], {"prompt_token_ids": ids, "cache_salt": "c"}], GREEDY)
    assert again[0].num_cached_tokens >= 64 and again[1].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda llm: llm.generate([]), "prompts"),
        (lambda llm: llm.generate(None), "prompts"),
        (lambda llm: llm.generate(b"x"), "prompts"),
        (lambda llm: llm.generate({}), "prompts"),
        (lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}}), "prompts"),
        (lambda llm: llm.generate(["x", 3.5]), "prompt"),
        (lambda llm: llm.generate(["x", "y"], [GREEDY]), "sampling_params"),
        (lambda llm: llm.generate("x", {"temperature": 0}), "sampling_params"),
        (lambda llm: llm.generate("x", prompt_token_ids=[[1]]), "prompt_token_ids"),
        (lambda llm: llm.generate("x", lora_request=object()), "lora_request"),
        (lambda llm: llm.chat([]), "messages"),
        (lambda llm: llm.chat("hello"), "messages"),
    ],
)
def test_bad_calls_name_the_argument(opt: LLM, call: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call(opt)
    assert refused.value.field == field
    assert opt.generate("Hello", GREEDY)[0].finished, "the next request is served"


# -- the real model ----------------------------------------------------------------------------------------------------


def test_chat_in_one_batch_is_exact_and_reuses(llm: LLM, hf_smollm2: PreTrainedModel) -> None:
    system = {"role": "system", "content": "You are a careful assistant who answers in one short sentence."}
    conversations = [
        [system, {"role": "user", "content": question}]
        for question in ("Name the capital of France.", "Name a river in Egypt and say where it ends.")
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    outputs = llm.chat(conversations, params)
    for output in outputs:
        assert output.prompt is not None and output.prompt.endswith("<|im_start|>assistant\n")
        assert output.outputs[0].token_ids == expected(hf_smollm2, output.prompt_token_ids, 16)
    [single] = llm.chat(conversations[0], params)
    assert single.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert single.num_cached_tokens >= len(single.prompt_token_ids) - 16


def test_a_chat_template_can_be_given(llm: LLM) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    [output] = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1), chat_template=template)
    assert output.prompt == "[Hi]"


def test_an_unfinished_answer_is_continued(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, three,"}]
    [output] = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None and output.prompt.endswith("One, two, three,")
    assert "four" in output.outputs[0].text


# -- defaults and options ----------------------------------------------------------------------------------------------


def test_sampling_defaults_come_from_the_generation_config(tiny_opt: Path) -> None:
    model = OPTForCausalLM.from_pretrained(tiny_opt)
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=20, max_new_tokens=5)
    model.save_pretrained(tiny_opt / "with-defaults")
    llms = [
        LLM(str(tiny_opt / "with-defaults"), str(tiny_opt), num_blocks=64, generation_config=c)
        for c in ("auto", "vllm")
    ]
    model_says, plain = (llm.get_default_sampling_params() for llm in llms)
    assert model_says == SamplingParams(temperature=0.6, top_k=20, max_tokens=5)
    assert plain == SamplingParams()
    for llm, limit in zip(llms, (5, 16), strict=True):
        [output] = llm.generate([[5, 6]])
        assert 1 <= len(output.outputs[0].token_ids) <= limit
    for llm in llms:
        llm.close()


def test_options_under_vllms_names() -> None:
    options = engine_options(
        {"gpu_memory_utilization": 0.5, "max_num_seqs": 4, "block_size": None, "seed": None, "kv_cache_dtype": "auto",
         "num_gpu_blocks_override": 99, "kv_cache_memory_bytes": 1 << 29, "tensor_parallel_size": 1, "enforce_eager": True,
         "swap_space": 4, "trust_remote_code": False, "quantization": None}
    )  # fmt: skip
    assert EngineConfig(**options) == EngineConfig(
        gpu_memory_utilization=0.5, max_num_seqs=4, num_blocks=99, kv_cache_gib=0.5
    )


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("trust_remote_code", True, "never run"),
        ("tensor_parallel_size", 2, "one device"),
        ("quantization", "awq", "dtype"),
        ("enable_lora", True, "adapters"),
        ("cpu_offload_gb", 4, "device"),
        ("max_model_length", 8, "Did you mean max_model_len"),
        ("zzz", 1, "unknown option"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        engine_options({name: value})
    assert refused.value.field == name
