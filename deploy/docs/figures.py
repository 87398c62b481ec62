"""Figures as the results in benchmarks/results have them, with the commit and the day of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deploy.docs.blocks import table
from deploy.local.table import figure

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_FRONT_WAYS = {
    "direct": "straight to the pod",
    "envoy": "Envoy alone",
    "envoy+plugin": "Envoy and plugin, no context",
    "envoy+plugin head": "Envoy and plugin, a turn named by its header",
    "http front": "HTTP front, no context",
    "http front turn": "HTTP front, a turn",
    "vllm-router": "vllm-router",
    "litellm": "litellm",
}
_PROCESSES = {"gateway": "gateway (behind Envoy)", "manager": "context-manager, to route it", "envoy": "Envoy"}
_COSTS = {"redis_us": "Redis", "manager_cpu_us": "the manager", "pod_cpu_us": "the turn process"}
_OVERHEAD = {
    "ttft": "time to the first token",
    "request": "whole request",
    "token": "between two tokens",
    "burst": "8 requests at once",
    "step": "between two tokens, while 5 800 tokens beside it are saved",
    "longest step": "longest wait for a token meanwhile",
}
_AGENT_PARTS = {"steady": "all agents at once", "killed": "after `kill -9` of an engine"}
_TIER_KINDS = ("store", "encrypted")
_SYSTEMS = {"ours": "ours", "lmcache": "LMCache", "tiering": "vLLM's tiering"}
_PHASES = {
    "calm": "before",
    "killed": "after `kill -9` of the engine",
    "lost": "after the loss of the pod",
    "all": "all",
}


def figures(name: str, up: str) -> str:
    """Return the figures called `name`, for a page from which `up` leads to the root, as `../`."""
    file, write = _WRITERS[name]
    if not (kept := RESULTS / f"{file}.json").exists():
        return f"(no run of `{file}` is kept yet)"
    result = json.loads(kept.read_text())
    text = write(result)
    return text + ("\n\n" if "\n" in text else " ") + _source(file, result, up)


def _source(file: str, result: Mapping[str, Any], up: str) -> str:
    return f"([{result['date']}, {result['commit']}]({up}benchmarks/results/{file}.json))"


def _ttft(result: Mapping[str, Any]) -> str:
    by_size: dict[int, dict[str, Any]] = {}
    for row in result["ttft"]:
        by_size.setdefault(row["size"], {})[row["way"]] = row["ttft_ms_median"]
    ways = ("cold", "create", "hit", "memory", "disk")
    rows = [
        [_spaced(size), *(f"{_spaced(of[way])} ms" for way in ways), _share(of["disk"] / of["cold"])]
        for size, of in by_size.items()
    ]
    heads = ["cold", "create", "engine's prefix cache", "restored from memory", "restored from disk", "disk of cold"]
    return table(["tokens", *heads], rows)


def _ttft_from(way: str, beside: tuple[str, ...], result: Mapping[str, Any]) -> str:
    of = {(row["size"], row["way"]): row["ttft_ms_median"] for row in result["ttft"]}
    shown = []
    for size in sorted({size for size, _ in of}):
        others = ", ".join(f"{other} {_spaced(of[size, other])} ms" for other in beside)
        shown.append(f"{_spaced(size)} tokens take {_spaced(of[size, way])} ms ({others})")
    return ". ".join(shown)


def _conversation(result: Mapping[str, Any]) -> str:
    last = {row["way"]: row for row in result["rows"]}  # rows come turn by turn
    costs = {way: (f"{row['seconds']:.0f} s", _spaced(row["computed_tokens"])) for way, row in last.items()}
    return (
        "{} turns of about {} tokens, after an eviction: vLLM alone takes {} and computes {} tokens. "
        "A context takes {} and computes {}. "
        "With the prefix still in the engine, vLLM alone takes {} and computes {}"
    ).format(result["turns"], result["turn_tokens"], *costs["stateless"], *costs["context"], *costs["prefix cache"])


def _beside(result: Mapping[str, Any]) -> str:
    of = {(row["size"], row["way"], row["system"]): row["ttft_ms_median"] for row in result["ttft"]}
    behind = {(row["size"], row["way"], row["beside"]) for row in result["rows"] if not row["met"]}
    systems = [name for name in _SYSTEMS if any(name == system for _, _, system in of)]
    rows = []
    for size, way in dict.fromkeys((size, way) for size, way, _ in of):
        times = {system: of[size, way, system] for system in systems}
        shown = ["-" if ms is None else f"{_spaced(ms)} ms" for ms in times.values()]
        near = [_SYSTEMS[system] for system in systems if (size, way, system) in behind]
        rows.append([_spaced(size), way, *shown, f"**not ahead of {' and '.join(near)}**" if near else ""])
    return table(["tokens", "", *(_SYSTEMS[name] for name in systems), ""], rows)


def _trace(result: Mapping[str, Any]) -> str:
    rows = [
        [
            _PHASES[row["phase"]],
            {"plain": "vLLM alone", **_SYSTEMS}[row["system"]],
            *(_spaced(row[what]) for what in ("requests", "failures", "wrong", "computed_tokens", "recomputed_tokens")),
            *(f"{_spaced(row[what])} ms" for what in ("ttft_ms_median", "ttft_ms_p99")),
        ]
        for phase in _PHASES
        for row in result["rows"]
        if row["phase"] == phase
    ]
    counts = ["requests", "failed tries", "wrong answers", "tokens computed", "of them again"]
    return table(["", "", *counts, "first token, median", "99th percentile"], rows)


def _traced(result: Mapping[str, Any]) -> str:
    of = {row["system"]: row for row in result["rows"] if row["phase"] == "all"}
    again, failed = (
        [_spaced(of[name][what]) for name in ("ours", "plain", "lmcache", "tiering")]
        for what in ("recomputed_tokens", "failures")
    )
    return (
        "{} requests, an engine killed, a pod lost. context-cache computed {} tokens again. "
        "vLLM alone computed {}, LMCache {}, vLLM's tiering {}. "
        "{} tries failed, with the others {}, {} and {}. Of {} answers of each, {} were wrong"
    ).format(len(result["phases"]), *again, *failed, result["cold"], sum(row["wrong"] for row in of.values()))


def _turns(result: Mapping[str, Any]) -> str:
    shown = {"turn": "whole turn", "ttft": "first token"}
    rows = [
        [
            f"{shown[row['what']]}, {'median' if row['percentile'] == 50 else '95th percentile'}",
            *(f"{row[f'{way}_ms'] / 1000:.1f} s" for way in ("sessions", "stateless")),
            f"{row['ratio']:.2f}",
            _wanted(row),
        ]
        for row in result["rows"]
    ]
    return table([f"{result['agents']} agents", "sessions", "sent whole", "ratio", "wanted"], rows)


def _agents(result: Mapping[str, Any]) -> str:
    of = {(row["part"], row["way"]): row for row in result["rounds_taken"]}
    ways = ("keep", "off")
    rows = [
        [
            shown,
            *(f"{of[part, way]['ttft_ms_p50'] / 1000:.1f} s" for way in ways),
            *(_spaced(of[part, way]["computed_tokens"]) for way in ways),
        ]
        for part, shown in _AGENT_PARTS.items()
    ]
    heads = ["first token, kept", "not kept", "tokens computed, kept", "not kept"]
    return table([f"{result['agents']} agents, medians of a turn", *heads], rows)


def _overhead(result: Mapping[str, Any]) -> str:
    rows = [
        [
            _OVERHEAD[row["what"]],
            *(f"{row[way]:.1f} ms" for way in ("with_ms", "without_ms")),
            "{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["ratio_95"]),
            _wanted(row),
        ]
        for row in result["rows"]
    ]
    return table(["", "with", "without", "ratio (95 %)", "wanted"], rows)


def _front(result: Mapping[str, Any]) -> str:
    small = {
        (row["kind"], row["way"]): row
        for row in result["rows"]
        if row["size"] == "small" and row["connections"] == {"requests": 1, "paced": 64}.get(row["kind"])
    }
    rows = []
    for way, shown in _FRONT_WAYS.items():
        request, chunk = small["requests", way], small["paced", way]
        costs = (_ms(request["cpu_us_total"]), f"{chunk['cpu_us_total']:.1f} µs") if way != "direct" else ("", "")
        rows.append([shown, f"{request['p50_ms']:.2f} ms", *costs])
    return table(["way", "p50", "CPU a request", "CPU a chunk of a paced stream"], rows)


def _front_bars(result: Mapping[str, Any]) -> str:
    rows = [
        [row["bar"], f"{row['limit']}".replace("<=", "≤").replace(">=", "≥"), f"{row['measured']:.2f}", _met(row)]
        for row in result["bars"]
    ]
    return table(["aim", "wanted", "measured", ""], rows)


def _front_turn(result: Mapping[str, Any]) -> str:
    bar = next(row for row in result["bars"] if row["bar"].startswith("envoy+plugin head: adds"))
    return f"{bar['measured']:.1f} ms longer than Envoy alone, where {bar['limit'].removeprefix('<= ')} ms is wanted"


def _idle(result: Mapping[str, Any]) -> str:
    of = {row["way"]: f"{row['kib_per_stream_total']:.0f} KiB" for row in result["idle"]}
    return (
        f"{of['envoy+plugin body']} with the plugin, {of['envoy']} in Envoy alone, {of['http front']} in the HTTP front"
    )


def _processes(result: Mapping[str, Any]) -> str:
    ways = {
        row["way"]: row["cpu_us"]
        for row in result["rows"]
        if (row["kind"], row["size"], row["connections"]) == ("requests", "small", 1)
    }
    rows = [
        [shown, _ms(ways["envoy+plugin head"][part]), _ms(ways["envoy+plugin"][part])]
        for part, shown in _PROCESSES.items()
    ]
    return table(["part", "CPU a turn", "CPU a request without a context"], rows)


def _turn_cost(result: Mapping[str, Any]) -> str:
    of = {(row["what"], row["cost"]): row["medians"] for row in result["rows"]}
    rows = [
        [shown, *(_ms(us) for what in ("here before", "new here") for us in of[what, cost])]
        for cost, shown in _COSTS.items()
    ]
    head = [
        "CPU of a turn's begin and commit",
        "pod had the turn before: 1 000 tokens",
        "128 000",
        "pod is new: 1 000",
        "128 000",
    ]
    return table(head, rows)


def _manager(result: Mapping[str, Any]) -> str:
    shown = {row["what"]: row for row in result["rows"]}
    calls = {"turns a second": "turns a second, many at once", "turn, p50": "turn, p50", "turn, p99": "turn, p99"}
    calls |= {"create, p50": "create, p50", "list, p50": "page of 20 of the list, p50"}
    calls |= {"sweep, nothing due": "sweep of all, nothing due", "sweep of a session": "sweep of one that is due"}
    calls |= {"bytes a session": "Redis, bytes a session"}
    return _growths([(text, shown[what]) for what, text in calls.items() if what in shown], "sessions stored")


def _scale(axis: str, result: Mapping[str, Any]) -> str:
    rows = [(row["what"], row) for row in result["rows"] if row["axis"] == axis]
    return _growths(rows, axis.partition(",")[0])


def _memory_of_a_context(result: Mapping[str, Any]) -> str:
    return f"{result['memory_of_a_context_bytes']['bytes'] / 1024:.1f} KiB"


def _growths(named: Iterable[tuple[str, Mapping[str, Any]]], sizes_are: str) -> str:
    shown = list(named)
    sizes = [int(size) for size in shown[0][1]["medians"]]
    rows = []
    for text, row in shown:
        unit = f" {row['unit']}" if row["unit"] in {"ms", "s", "MiB"} else ""
        costs = [f"{figure(row['medians'][str(size)])}{unit}" for size in sizes]
        exponent = "-" if row["exponent"] is None else f"{round(row['exponent'], 2) + 0:.2f}"
        rows.append([text, *costs, exponent, row["wanted"], _met(row)])
    return table([sizes_are, *map(_spaced, sizes), "exponent", "wanted", ""], rows)


def _codec(result: Mapping[str, Any]) -> str:
    heads = ["codec", "bytes a token", "of none", "same answer", "same tokens", "off: mean", "95 %"]
    heads += ["restored from disk", "from memory", "computed"]
    rows = [
        [
            f"`{row['codec']}`",
            _spaced(row["bytes_a_token"]),
            _share(row["bytes_ratio"]),
            f"{row['agree']:.1%} of {row['turns']}, {row['restored']} of them restored",
            f"{row['same_tokens']:.1%}",
            *(f"{row[name]:.4f}" for name in ("logprob_off_mean", "logprob_off_p95")),
            *(f"{_spaced(row[name])} ms" for name in ("disk_ms", "memory_ms", "cold_ms")),
        ]
        for row in result["rows"]
    ]
    return table(heads, rows)


def _codec_numbers(result: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{row['codec']}`",
            *map(str, (row["group"], row["bits"], row["error"])),
            *(f"{row[name]:.1f} GB/s" for name in ("encode_gb_s", "decode_gb_s")),
        ]
        for row in result["numbers"]
    ]
    return table(["codec", "group", "bits a number", "error", "coding", "bringing back"], rows)


def _weights(result: Mapping[str, Any]) -> str:
    sampled, whole = f"{result['sampled_bytes'] / 1e6:.1f} MB", result["whole_sha256_warm_ms"] / 1000
    return (
        f"{result['size_bytes'] >> 30} GiB: {sampled} in {result['sample_warm_ms']:.0f} ms, from a cold disk "
        f"{result['sample_cold_ms']:.0f} ms; whole {whole:.0f} to {result['whole_cold_ms'] / 1000:.0f} s"
    )


def _hostile(result: Mapping[str, Any]) -> str:
    waits = {row["front"]: f"{row['max_s']:.1f} s" for row in result["rows"]}
    return f"make others wait for {waits['http']} at most at the HTTP front, {waits['envoy']} behind Envoy"


def _not_found(result: Mapping[str, Any]) -> str:
    shares = [row["share"] for row in result["rows"] if row["pair"] == "absent / foreign"]
    return (
        f"over {result['rounds']} interleaved calls of each kind, method and front, a call about an absent id took "
        f"longer than one about a foreign id in {min(shares):.1%} to {max(shares):.1%} of all pairs"
    )


def _conversations(result: Mapping[str, Any]) -> str:
    (run,) = (run["rows"] for run in result["runs"])
    return f"`conversations`: {run['turns']} turns over {run['engines']} engines, {run['differences']} differences"


def _matrix(result: Mapping[str, Any]) -> str:
    cases, last = (result["runs"][place]["rows"] for place in (0, -1))
    slowest = f"{last['slowest, s beyond the recompute']:.1f} s"
    again = "; in the last run, over those mended," if len(result["runs"]) > 1 else ","
    return f"`matrix`: {cases['cases']} cases{again} {slowest} at most beyond the recompute"


def _orphans(result: Mapping[str, Any]) -> str:
    (run,) = (run["rows"] for run in result["runs"])
    return f"`orphans`: {run['rounds']} rounds with {run['crashes']} crashes"


def _soak(result: Mapping[str, Any]) -> str:
    run = result["rows"]
    return f"`soak`: {run['minutes']:.0f} minutes, {run['turns']} turns, {run['faults']} faults"


def _met(row: Mapping[str, Any]) -> str:
    return "**missed**" if row["met"] is False else ""


def _wanted(row: Mapping[str, Any]) -> str:
    return "" if row["bar"] is None else f"≤ {row['bar']}{'' if row['met'] else ', **missed**'}"


def _ms(us: float) -> str:
    return f"{us / 1000:.1f} ms"


def _spaced(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def _share(ratio: float) -> str:
    return f"{ratio * 100:.{0 if ratio > 0.1 else 1}f} %"


def _simulate(result: Mapping[str, Any]) -> str:
    tiers = ("device", "host", "disk", "peer", "store", "recompute")
    rows = [
        [
            _spaced(row["pods"]),
            row["when"],
            f"{row['hit_rate']:.1%}",
            *(f"{row['restores'].get(tier, 0):.1%}" for tier in tiers),
            f"{row['stayed']:.1%}",
            f"{row['served_skew']:.2f}",
            *(f"{_spaced(row['first_token_ms'][q])} ms" for q in ("50", "95")),
            *(f"{row['busy'][what]:.0%}" for what in ("compute", "seal")),
        ]
        for row in result["rows"]
    ]
    heads = ["pods", "when", "tokens not computed", *tiers, "turns that stayed", "skew", "first token, p50", "p95"]
    return table([*heads, "GPU", "disk writes"], rows)


def _simulate_control(result: Mapping[str, Any]) -> str:
    rows = [[figure(value) for value in row.values()] for row in result["control"]]
    return table(list(result["control"][0]), rows)


def _simulate_rates(result: Mapping[str, Any]) -> str:
    rates = result["rates"]
    token_bytes = rates["bytes_per_token"]
    computed, sealed = (rates["computed_tokens_per_s"] * token_bytes / 1e9, rates["sealed_bytes_per_s"] / 1e9)
    in_time = rates["pull_wait_s"] * min(rates["sealed_bytes_per_s"], rates["wire_bytes_per_s"]) / token_bytes
    return (
        f"{computed:.2f} GB/s of KV computed, {sealed:.2f} GB/s written and read back from others: "
        f"{_spaced(in_time)} tokens in the {rates['pull_wait_s']:.0f} s that a turn waits for"
    )


def _store(result: Mapping[str, Any]) -> str:
    rows = []
    of = {(row["store"], row["way"], row["what"]): row["gb_s"] for row in result["rows"]}
    for store, way in dict.fromkeys((store, way) for store, way, _ in of):
        copy = of[store, way, "copy"]
        rates = [of[store, way, kind] for kind in _TIER_KINDS]
        tier = [f"{rate:.2f} GB/s ({_share(rate / copy)})" for rate in rates]
        rows.append([f"{store}, {way}", f"{copy:.2f} GB/s", *tier])
    return table(["", "copied with the same library", "by the sidecar", "encrypted"], rows)


def _vllm_versions(result: Mapping[str, Any]) -> str:
    versions = sorted(result["versions"], key=lambda version: tuple(map(int, version.split("."))))
    promises = list(dict.fromkeys(row for version in versions for row in result["versions"][version]["rows"]))

    def cell(seen: Mapping[str, Any] | None) -> str:
        if seen is None:
            return "not run"
        total = seen["passed"] + len(seen["failed"])
        return "yes" if not seen["failed"] else f"{seen['passed']} of {total}" if seen["passed"] else "no"

    rows = [
        [promise, *(cell(result["versions"][each]["rows"].get(promise)) for each in versions)] for promise in promises
    ]
    return table(["vLLM", *versions], rows)


_WRITERS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "ttft": ("bench_ttft", _ttft),
    "ttft-gpu": ("bench_ttft_gpu", _ttft),
    "ttft-peer": ("bench_ttft_peer", partial(_ttft_from, "peer", ("cold",))),
    "ttft-store": ("bench_ttft_store", partial(_ttft_from, "store", ("disk", "cold"))),
    "conversation": ("bench_conversation", _conversation),
    "beside": ("bench_beside", _beside),
    "trace": ("bench_trace", _trace),
    "traced": ("bench_trace", _traced),
    "turns": ("bench_turns", _turns),
    "agents": ("bench_agents", _agents),
    "overhead": ("bench_overhead", _overhead),
    "front": ("bench_front", _front),
    "front-bars": ("bench_front", _front_bars),
    "front-turn": ("bench_front", _front_turn),
    "idle": ("bench_front", _idle),
    "processes": ("bench_front", _processes),
    "turn-cost": ("bench_turn_cost", _turn_cost),
    "manager": ("bench_manager", _manager),
    "scale-contexts": ("bench_scale", partial(_scale, "contexts")),
    "scale-tenants": ("bench_scale", partial(_scale, "tenants")),
    "scale-8b": ("bench_scale", partial(_scale, "tokens, 8B")),
    "scale-long": ("bench_scale", partial(_scale, "tokens, long")),
    "memory-of-a-context": ("bench_scale", _memory_of_a_context),
    "simulate": ("bench_simulate", _simulate),
    "simulate-rates": ("bench_simulate", _simulate_rates),
    "simulate-control": ("bench_simulate", _simulate_control),
    "store": ("bench_store", _store),
    "vllm-versions": ("vllm_versions", _vllm_versions),
    "codec": ("bench_codec", _codec),
    "codec-numbers": ("bench_codec", _codec_numbers),
    "weights": ("bench_weights", _weights),
    "hostile": ("bench_hostile_bodies", _hostile),
    "not-found": ("bench_not_found", _not_found),
    "conversations": ("torture_conversations", _conversations),
    "matrix": ("torture_matrix", _matrix),
    "orphans": ("torture_orphans", _orphans),
    "soak": ("soak", _soak),
}
