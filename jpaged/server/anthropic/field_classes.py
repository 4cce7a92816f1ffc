"""The fields of Anthropic's requests that are known but not applied; see `jpaged.server.bodies.FieldClasses`."""

from __future__ import annotations

from jpaged.server.bodies import FieldClasses

_UNUSED = "it is for the client's own records"
_ABSENT = "the server has no such tool"
_SERVER_TOOLS = dict.fromkeys(
    (
        "bash_20241022",
        "bash_20250124",
        "browser_toolset_20260801",
        "code_execution_20250522",
        "code_execution_20250825",
        "code_execution_20260120",
        "code_execution_20260521",
        "computer_20241022",
        "computer_20250124",
        "computer_toolset_20260801",
        "memory_20250818",
        "text_editor_20241022",
        "text_editor_20250124",
        "text_editor_20250429",
        "text_editor_20250728",
        "tool_search_tool_bm25_20251119",
        "tool_search_tool_regex_20251119",
        "web_fetch_20250910",
        "web_fetch_20260209",
        "web_fetch_20260309",
        "web_fetch_20260318",
        "web_search_20250305",
        "web_search_20260209",
        "web_search_20260318",
    ),
    _ABSENT,
)
"""Tools that Anthropic's servers run, or that its models know without a schema."""
_SERVER_BLOCKS = dict.fromkeys(
    (
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_reference",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ),
    "the model is not shown what another server's tools did",
)
BLOCK = FieldClasses(
    without_effect={"citations": "the model is shown the text", "caller": _UNUSED, "toolset_name": _UNUSED},
    not_honoured={"transformations": "images are prepared as the model needs them"},
    items={"content": {**_SERVER_BLOCKS, "redacted_thinking": ""}},
)
MESSAGE = FieldClasses(without_effect={"id": _UNUSED}, items={"content": {**_SERVER_BLOCKS, "redacted_thinking": ""}})
TOOL = FieldClasses(
    without_effect={"eager_input_streaming": "arguments stream as they grow"},
    not_honoured={
        "allowed_callers": "the model is the only caller",
        "defer_loading": "the prompt has all tools",
        "input_examples": "the model is not shown examples of a tool's input",
    },
)
CONVERSATION = FieldClasses(
    without_effect={"diagnostics": _UNUSED, "user_profile_id": _UNUSED, "workspace_id": _UNUSED},
    not_honoured={
        "container": "the server runs no code",
        "context_management": "the model is shown the conversation that is sent",
        "inference_geo": "the server is where it is",
        "mcp_servers": _ABSENT,
        "speed": "there is one speed",
    },
    items={"tools": _SERVER_TOOLS},
)
TABLE = {
    "conversation of messages": CONVERSATION,
    "message of messages": MESSAGE,
    "block of messages": BLOCK,
    "tool of messages": TOOL,
}
"""Every row, by the object that a caller sends."""
