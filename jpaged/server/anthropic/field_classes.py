"""The fields of Anthropic's requests that are known but not applied; see `jpaged.server.bodies.FieldClasses`."""

from __future__ import annotations

from jpaged.server.bodies import FieldClasses

_UNUSED = "it is for the client's own records"
_UNBILLED = "nothing is billed"
_SENT = "the model is shown the conversation that is sent"
_ABSENT = "the server has no such tool"
_SERVER_TOOLS = dict.fromkeys(
    (
        "advisor_20260301",
        "bash_20241022",
        "bash_20250124",
        "browser_toolset_20260801",
        "code_execution_20250522",
        "code_execution_20250825",
        "code_execution_20260120",
        "code_execution_20260521",
        "computer_20241022",
        "computer_20250124",
        "computer_20251124",
        "computer_toolset_20260801",
        "mcp_toolset",
        "memory_20250818",
        "text_editor_20241022",
        "text_editor_20250124",
        "text_editor_20250429",
        "text_editor_20250728",
        "tool_search_tool_bm25",
        "tool_search_tool_bm25_20251119",
        "tool_search_tool_regex",
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
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_addition",
        "tool_reference",
        "tool_removal",
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
SOURCE = FieldClasses(refused={"file_id": "there are no files: give data or url"})
MESSAGE = FieldClasses(
    without_effect={"id": _UNUSED},
    not_honoured={"clear_at": _SENT},
    items={"content": {**_SERVER_BLOCKS, "redacted_thinking": ""}},
)
THINKING = FieldClasses(without_effect={"block_binding": "thoughts are not sealed"})
OUTPUT_CONFIG = FieldClasses(not_honoured={"task_budget": "the model sees no budget; max_tokens is followed"})
TOOL = FieldClasses(
    without_effect={"eager_input_streaming": "arguments stream as they grow"},
    not_honoured={
        "allowed_callers": "the model is the only caller",
        "defer_loading": "the prompt has all tools",
        "input_examples": "the model is not shown examples of a tool's input",
    },
)
CONVERSATION = FieldClasses(
    without_effect={
        "billing_policy": _UNBILLED,
        "diagnostics": _UNUSED,
        "fallback_credit_token": _UNBILLED,
        "user_profile_id": _UNUSED,
        "workspace_id": _UNUSED,
    },
    not_honoured={
        "compaction": _SENT,
        "container": "the server runs no code",
        "context_management": _SENT,
        "fallbacks": "the server has one model",
        "inference_geo": "the server is where it is",
        "mcp_servers": _ABSENT,
        "speed": "there is one speed",
    },
    refused={"thread": "no messages are kept: send the whole conversation"},
    items={"tools": _SERVER_TOOLS},
)
TABLE = {
    "conversation of messages": CONVERSATION,
    "message of messages": MESSAGE,
    "block of messages": BLOCK,
    "source of messages": SOURCE,
    "thinking of messages": THINKING,
    "output_config of messages": OUTPUT_CONFIG,
    "tool of messages": TOOL,
}
"""Every row, by the object that a caller sends."""
