"""The two boards, as code: ``python -m docker.grafana.boards`` writes them into ``dashboards/``.

overview: does the worker serve well? pipeline: where does the time of its stages go?
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableRefresh,
    VariableSort,
)

from docker.grafana.panels import DATASOURCE, Panel, Query, Row, to_grafana
from docker.grafana.promql import mean, quantile, rate, select, total
from metrics import catalog
from metrics.catalog import Metric

DIRECTORY = Path(__file__).parent / "dashboards"


def _quantiles(metric: Metric, **matchers: str) -> list[Query]:
    return [Query(quantile(q, metric, **matchers), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


def _busy(*by: str, states: str = "~compute|transfer|wait_input|wait_slot|wait_token|host") -> str:
    return rate(catalog.STAGE_STATE, *by, state=states)


BUBBLE = f"{_busy('instance', 'rank', states='~wait_input|wait_slot|wait_token|host')} / ({_busy('instance', 'rank')} > 0)"
KV_USED = f"{total(catalog.KV_BLOCKS, 'instance', 'rank', state='used')} / {total(catalog.KV_BLOCKS, 'instance', 'rank')}"

OVERVIEW = (
    Row(
        title="Now",
        panels=[
            Panel(
                title="Workers ready",
                description="Workers that admit requests.",
                queries=[Query(total(catalog.ENGINE_READY))],
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                title="Ranks without a process",
                description="Anything but 0 is an outage.",
                queries=[Query(f"count({select(catalog.RANK_UP)}) - sum({select(catalog.RANK_UP)})")],
                kind="stat",
                width=4,
                height=4,
                alarm=1,
            ),
            Panel(
                title="Tokens a second",
                description="Generated, all workers together.",
                queries=[Query(rate(catalog.GENERATED_TOKENS))],
                kind="stat",
                width=4,
                height=4,
            ),
            Panel(
                title="First token, p95",
                description="The objective is 2 s for 95 % of requests.",
                queries=[Query(quantile(0.95, catalog.TIME_TO_FIRST_TOKEN))],
                kind="stat",
                unit="s",
                width=4,
                height=4,
                warn=1,
                alarm=2,
            ),
            Panel(
                title="Between tokens, p99",
                description="Between two steps that gave tokens to a request.",
                queries=[Query(quantile(0.99, catalog.INTER_TOKEN_LATENCY))],
                kind="stat",
                unit="s",
                width=4,
                height=4,
            ),
            Panel(
                title="Fullest KV cache",
                description="Used blocks of the rank that has the fewest free.",
                queries=[Query(f"max({KV_USED})")],
                kind="stat",
                unit="percentunit",
                width=4,
                height=4,
                high=1,
                warn=0.9,
                alarm=0.95,
            ),
        ],
    ),
    Row(
        title="Requests",
        panels=[
            Panel(
                title="Running and waiting",
                description="Running requests hold a sequence slot, waiting ones are admitted and wait for one.",
                queries=[
                    Query(total(catalog.REQUESTS_RUNNING, "instance"), "running {{instance}}"),
                    Query(total(catalog.REQUESTS_WAITING, "instance"), "waiting {{instance}}"),
                ],
            ),
            Panel(
                title="Finished, by reason",
                description="stop and length are answers; abort: the client went away; error: our fault.",
                queries=[Query(rate(catalog.REQUESTS_FINISHED, "reason"), "{{reason}}")],
                unit="reqps",
            ),
            Panel(
                title="Rejected, by reason",
                description="queue_full: 429; not_ready: 503; invalid: other 4xx.",
                queries=[Query(rate(catalog.REQUESTS_REJECTED, "reason"), "{{reason}}")],
                unit="reqps",
            ),
        ],
    ),
    Row(
        title="Latency",
        panels=[
            Panel(
                title="Time to first token",
                description="From the arrival of a request.",
                queries=_quantiles(catalog.TIME_TO_FIRST_TOKEN),
                unit="s",
                warn=2,
            ),
            Panel(
                title="Between tokens",
                description="Between two steps that gave tokens to a request.",
                queries=_quantiles(catalog.INTER_TOKEN_LATENCY),
                unit="s",
            ),
            Panel(
                title="Time per output token",
                description="Of finished requests: the decode phase over the tokens but the first.",
                queries=_quantiles(catalog.TIME_PER_OUTPUT_TOKEN),
                unit="s",
            ),
            Panel(
                title="Whole request",
                description="From the arrival to the last token, of requests that ended with stop or length.",
                queries=_quantiles(catalog.E2E_REQUEST_LATENCY),
                unit="s",
            ),
            Panel(
                title="Phases of a request, mean",
                description="They add up to the whole: queue, prefill (to the first token), decode (to the last).",
                queries=[Query(mean(catalog.REQUEST_PHASE, "phase"), "{{phase}}")],
                kind="stacked",
                unit="s",
            ),
            Panel(
                title="Tokens a second",
                description="Prompt tokens count when their request gets its first token.",
                queries=[
                    Query(rate(catalog.PROMPT_TOKENS), "prompt"),
                    Query(rate(catalog.GENERATED_TOKENS), "generated"),
                ],
            ),
        ],
    ),
    Row(
        title="Engine",
        panels=[
            Panel(
                title="Plan a step, p99",
                description="To plan one step, encode it and hand it to every channel.",
                queries=[Query(quantile(0.99, catalog.SCHEDULE, "instance"), "{{instance}}")],
                unit="s",
            ),
            Panel(
                title="Tokens to text, p99",
                description="The tokens that one step gave one request.",
                queries=[Query(quantile(0.99, catalog.DETOKENIZE, "instance"), "{{instance}}")],
                unit="s",
            ),
            Panel(
                title="Lag of the engine's loop, p99",
                description="How much later than asked a timer was called.",
                queries=[Query(quantile(0.99, catalog.LOOP_LAG, "instance"), "{{instance}}")],
                unit="s",
            ),
        ],
    ),
    Row(
        title="Memory and processes",
        panels=[
            Panel(
                title="KV cache used",
                description="Above 95 % requests are about to be preempted.",
                queries=[Query(KV_USED, "{{instance}} rank {{rank}}")],
                unit="percentunit",
                high=1,
                warn=0.95,
            ),
            Panel(
                title="Preemptions",
                description="Requests put back into the queue since no KV block was free; they are prefilled anew.",
                queries=[Query(rate(catalog.PREEMPTIONS, "instance"), "{{instance}}")],
                unit="ops",
            ),
            Panel(
                title="Memory of each process",
                description="Resident; on a GPU the weights are not in it.",
                queries=[Query(total(catalog.PROCESS_RESIDENT, "instance", "rank"), "{{instance}} {{rank}}")],
                unit="bytes",
            ),
            Panel(
                title="CPU of each process",
                description="Cores. A rank on a GPU spins while steps are in flight.",
                queries=[Query(rate(catalog.PROCESS_CPU, "instance", "rank"), "{{instance}} {{rank}}")],
            ),
            Panel(
                title="Open file descriptors",
                description="One that only grows is a leak.",
                queries=[Query(total(catalog.PROCESS_OPEN_FDS, "instance", "rank"), "{{instance}} {{rank}}")],
            ),
            Panel(
                title="What runs",
                description="Version, Python and torch of every process.",
                queries=[Query(select(catalog.BUILD_INFO))],
                kind="table",
            ),
        ],
    ),
)

PIPELINE = (
    Row(
        title="Now",
        panels=[
            Panel(
                title="Bubble, by rank",
                description="Share of the time with work in the pipeline in which a rank neither computed nor transferred.",
                queries=[Query(BUBBLE, "{{instance}} rank {{rank}}")],
                kind="bars",
                unit="percentunit",
                high=1,
                warn=0.2,
                alarm=0.4,
            ),
            Panel(
                title="Age of the last step",
                description="Old only matters while steps are in flight.",
                queries=[Query(f"time() - ({select(catalog.LAST_STEP_TIMESTAMP)} > 0)", "{{instance}} rank {{rank}}")],
                kind="bars",
                unit="s",
                warn=5,
                alarm=10,
            ),
            Panel(
                title="Stages",
                description="Layers, transport and device of each rank.",
                queries=[Query(select(catalog.STAGE_INFO))],
                kind="table",
            ),
        ],
    ),
    Row(
        title="States",
        panels=[
            Panel(
                title="Rank $rank",
                description="What the stage does; at each instant it is one thing. idle: nothing in the whole pipeline.",
                queries=[Query(rate(catalog.STAGE_STATE, "state", rank="~$rank"), "{{state}}")],
                kind="stacked",
                unit="percentunit",
                width=12,
                high=1,
                repeat="rank",
            ),
        ],
    ),
    Row(
        title="Bubble and balance",
        panels=[
            Panel(
                title="Bubble",
                description="Waiting and host time over the time with load.",
                queries=[Query(BUBBLE, "{{instance}} rank {{rank}}")],
                unit="percentunit",
                high=1,
            ),
            Panel(
                title="Load",
                description="Share of the time with work in the pipeline.",
                queries=[Query(_busy("instance", "rank"), "{{instance}} rank {{rank}}")],
                unit="percentunit",
                high=1,
            ),
            Panel(
                title="Computing",
                description="Equal lines are a good layer split.",
                queries=[Query(_busy("instance", "rank", states="compute"), "{{instance}} rank {{rank}}")],
                unit="percentunit",
                high=1,
            ),
        ],
    ),
    Row(
        title="Who waits for whom",
        panels=[
            Panel(
                title="Time waited, by reason and peer",
                description="Share of a second: rank, what it waited for, and which rank it waited on.",
                queries=[
                    Query(
                        rate(catalog.STAGE_WAIT, "rank", "reason", "peer", suffix="_sum"),
                        "rank {{rank}}: {{reason}} of {{peer}}",
                    )
                ],
                unit="percentunit",
            ),
            Panel(
                title="One wait, p99",
                description="Of one step, 0 when it had not to wait.",
                queries=[
                    Query(quantile(0.99, catalog.STAGE_WAIT, "rank", "reason", "peer"), "rank {{rank}}: {{reason}} of {{peer}}")
                ],
                unit="s",
            ),
            Panel(
                title="Ring slots",
                description="receiving: asked for; reading: a forward has it; sending: waits for a slot, or is copied.",
                queries=[Query(total(catalog.RING_SLOTS, "rank", "state"), "rank {{rank}} {{state}}")],
            ),
        ],
    ),
    Row(
        title="Transfers and token return",
        panels=[
            Panel(
                title="Transfer on the host's clock, p50 and p99",
                description="From when it could begin to its end.",
                queries=[
                    Query(
                        quantile(q, catalog.TRANSFER, "rank", "op", "peer"),
                        f"p{q * 100:g} rank {{{{rank}}}} {{{{op}}}} {{{{peer}}}}",
                    )
                    for q in (0.5, 0.99)
                ],
                unit="s",
            ),
            Panel(
                title="Transfer on the device's clock, p50 and p99",
                description="By event pairs on a GPU, by the thread itself on a CPU.",
                queries=[
                    Query(
                        quantile(q, catalog.TRANSFER_DEVICE, "rank", "op", "peer"),
                        f"p{q * 100:g} rank {{{{rank}}}} {{{{op}}}} {{{{peer}}}}",
                    )
                    for q in (0.5, 0.99)
                ],
                unit="s",
            ),
            Panel(
                title="Bytes a second",
                description="Payload, without headers.",
                queries=[Query(rate(catalog.TRANSFER_BYTES, "rank", "op", "peer"), "rank {{rank}} {{op}} {{peer}}")],
                unit="Bps",
            ),
            Panel(
                title="Failed transfers",
                description="Each ends an epoch.",
                queries=[Query(rate(catalog.TRANSFER_ERRORS, "rank", "kind"), "rank {{rank}} {{kind}}")],
                unit="ops",
            ),
            Panel(
                title="From a point reached to its coroutine, p50 and p99",
                description="What awaiting costs.",
                queries=[
                    Query(quantile(q, catalog.EVENT_WAKE, "rank"), f"p{q * 100:g} rank {{{{rank}}}}") for q in (0.5, 0.99)
                ],
                unit="s",
            ),
            Panel(
                title="How the loop saw points",
                description="spin: it looked; park: it slept and was woken; timer: only the safety net found it.",
                queries=[Query(rate(catalog.EVENT_WAKES, "rank", "mode"), "rank {{rank}} {{mode}}")],
                unit="ops",
            ),
        ],
    ),
    Row(
        title="Steps",
        panels=[
            Panel(
                title="Forward of a step, p50 and p99",
                description="Sampling included.",
                queries=[
                    Query(quantile(q, catalog.STEP_DURATION, "rank"), f"p{q * 100:g} rank {{{{rank}}}}") for q in (0.5, 0.99)
                ],
                unit="s",
            ),
            Panel(
                title="Steps a second, by phase",
                description="prefill, decode, or both in one step.",
                queries=[Query(rate(catalog.STEP_DURATION, "rank", "phase", suffix="_count"), "rank {{rank}} {{phase}}")],
                unit="ops",
            ),
            Panel(
                title="Rows and tokens of a step, mean",
                description="Rows are requests that have a part in it, tokens the positions computed.",
                queries=[
                    Query(mean(catalog.STEP_ROWS, "instance"), "rows {{instance}}"),
                    Query(mean(catalog.STEP_TOKENS, "instance"), "tokens {{instance}}"),
                ],
            ),
            Panel(
                title="Steps in flight",
                description="Planned and not back, the most there may be, and begun on each rank.",
                queries=[
                    Query(total(catalog.STEPS_IN_FLIGHT, "instance"), "in flight {{instance}}"),
                    Query(total(catalog.LANE_DEPTH, "instance"), "lane depth {{instance}}"),
                    Query(total(catalog.INFLIGHT_STEPS, "instance", "rank"), "{{instance}} rank {{rank}}"),
                ],
            ),
            Panel(
                title="Stale rows",
                description="Tokens and results dropped since their request had ended or moved.",
                queries=[
                    Query(rate(catalog.STALE_ROWS, "rank"), "rank {{rank}}"),
                    Query(rate(catalog.STALE_RESULTS), "engine"),
                ],
                unit="ops",
            ),
            Panel(
                title="Lives of ranks",
                description="ready: takes steps; restarts: processes after the first; epoch: which life of the whole set; "
                "links: with peers, built and proven.",
                queries=[
                    Query(total(catalog.READY, "rank"), "ready {{rank}}"),
                    Query(total(catalog.PEER_CONNECTED, "rank"), "links {{rank}}"),
                    Query(select(catalog.EPOCH), "epoch {{instance}} {{rank}}"),
                    Query(select(catalog.RANK_RESTARTS), "restarts {{instance}} {{rank}}"),
                ],
            ),
        ],
    ),
)

BOARDS = {
    "overview": ("Stagewire: overview", "Does the worker serve well?", OVERVIEW),
    "pipeline": ("Stagewire: pipeline", "Where does the time of the stages go?", PIPELINE),
}


def build(name: str) -> str:
    """A board as Grafana's JSON."""
    title, description, rows = BOARDS[name]
    board = (
        dashboard.Dashboard(title)
        .uid(f"stagewire-{name}")
        .description(description)
        .tags(["stagewire"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Stagewire")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["stagewire"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus"))
        .with_variable(_variable("instance", f"label_values({catalog.ENGINE_READY.full_name}, instance)", "Worker"))
    )
    if any(panel.repeat == "rank" for row in rows for panel in row.panels):
        ranks = f"label_values({select(catalog.RANK_UP)}, {catalog.RANK_LABEL})"
        board.with_variable(_variable("rank", ranks, "Rank"))
    for row in rows:
        board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board.with_panel(to_grafana(panel))
    return json.dumps(_numbered(board.build()), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def queries(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Every panel's title and query."""
    return [(panel.title, query.expr) for row in rows for panel in row.panels for query in panel.queries]


def _variable(name: str, query: str, label: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
    )


def _numbered(board: object) -> Any:
    """The board as plain JSON with an id for each panel, in order: Grafana would choose others at each start."""
    plain = json.loads(json.dumps(board, cls=JSONEncoder))
    for number, panel in enumerate(plain["panels"], start=1):
        panel["id"] = number
    return plain


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name in BOARDS:
        (DIRECTORY / f"{name}.json").write_text(build(name))
