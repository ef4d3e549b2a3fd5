"""Replaces vLLM's tests/conftest.py: every test runs twice, first directly at vLLM, then through the router. The run fails
if a test passes directly and not through the router."""

import collections

import huggingface_hub
import pytest
import vllm.transformers_utils.repo_utils

from tests.utils import MODEL, RemoteOpenAIServer

WAYS = ("directly", "router")

# Tests that may pass only directly, by their functions' names, and why.
LEFT_OUT = {
    "test_show_version": "/version is the router's own",
    "test_anthropic_streaming_cache_usage": "the first of the two runs warms the cache",
    "test_simple_messages": "the text is sampled",
    "test_structured_outputs_regex_chat": "the text is sampled, and two samples must differ",
    **dict.fromkeys(
        ("test_batched_chat_completions", "test_batched_chat_completions_return_tokens_as_token_ids"), "the answer has no bound, and 60 s at most"
    ),
    "test_chat_session_with_echo_and_continue_final_message": "the text is sampled, has no bound, and must end by itself",
    "test_chat_session_root_path_with_api_key": "the router has no --root-path",
    "test_enable_request_id_header": "/health is the router's own",
    "test_custom_request_id_header": "/health is the router's own",
    **dict.fromkeys(
        ("test_get_model_name", "test_return_none", "test_echo_args_kwargs"), "administration: the answer lists those of all workers"
    ),
}


class Downloads:
    """Gives the small model for every model."""

    def snapshot_download(self, *_, **__):
        return MODEL

    hf_hub_download = snapshot_download


huggingface_hub.snapshot_download = Downloads().snapshot_download
vllm.transformers_utils.repo_utils.hf_api = lambda *_, **__: Downloads()

passed = collections.defaultdict(dict)  # whether a test passed, by its name and the way
reasons = {}  # why it did not pass through the router
unreadable = []  # reports of files that could not be imported


@pytest.fixture(autouse=True)
def way(request):
    RemoteOpenAIServer.through_router = request.param == "router"


def pytest_generate_tests(metafunc):
    metafunc.parametrize("way", WAYS, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    way = item.callspec.params["way"]
    name = item.nodeid.removeprefix("tests/entrypoints/").replace(f"-{way}]", "]").replace(f"[{way}]", "").replace(f"[{way}-", "[")
    passed[name][way] = report.passed and passed[name].get(way, True)
    if not report.passed and way == "router":
        reasons[name] = report.longreprtext or str(report.longrepr)
    return report


def pytest_collectreport(report):
    if report.failed:
        unreadable.append(report)


@pytest.hookimpl(trylast=True)  # after the fixtures have left their servers
def pytest_sessionfinish(session):
    RemoteOpenAIServer.stop_idle()
    session.exitstatus = int(bool(worse() or unreadable) or not any(ways.get("directly") for ways in passed.values()))


def left_out(name):
    return LEFT_OUT.get(name.split("::")[-1].split("[")[0])


def worse():
    """The names of the tests that pass directly and not through the router, but for those left out."""
    return [name for name, ways in passed.items() if ways.get("directly") and not ways.get("router") and not left_out(name)]


def pytest_terminal_summary(terminalreporter):
    write = terminalreporter.write_line
    for report in unreadable:
        terminalreporter.section(f"not imported: {report.nodeid}")
        write(report.longreprtext)
    for name in worse():
        terminalreporter.section(f"only directly: {name}")
        write(reasons.get(name, "did not run"))
    terminalreporter.section("vLLM's own tests")
    counts = collections.Counter()
    for name, ways in passed.items():
        directly, routed = (bool(ways.get(way)) for way in WAYS)
        counts[directly, routed] += 1
        if directly != routed:
            write(f"only {'directly' if directly else 'through the router'}: {name} {left_out(name) or ''}")
    write(f"{counts[True, True]} passed both ways, {counts[False, False]} neither (skipped, or need another model)")
    write(f"{counts[True, False]} only directly, {len(worse())} of them not left out; {counts[False, True]} only through the router")
