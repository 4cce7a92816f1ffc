"""Table of the request fields that a server knows but does not apply: the one place that says what becomes of each.

A field of a body's own is *applied*. The table has the others, in three classes. A field *without effect* cannot change
a token, and is dropped. A field *not honoured* asks for something that this server cannot do: the answer names it, and
``--strict-fields`` refuses it. A *refused* field would change the answer, so it is an error. Anything else is unknown,
and refused. docs/compatibility.md shows the table.
"""

from __future__ import annotations

from jpaged.server.bodies import FieldClasses
from jpaged.vllm_names import FIELDS

_CACHED = "prefixes are cached by their tokens; cache_salt keeps them apart"
_UNUSED = "it is for the client's own records"
_SHOWN = {"cache_control": _CACHED}
_CACHE = {
    "prompt_cache_key": _CACHED,
    "prompt_cache_options": _CACHED,
    "prompt_cache_retention": "cached prefixes stay until others need their memory",
    "client_metadata": _UNUSED,
}
_ABSENT = "the server has no such tool"
_SERVER_TOOLS = dict.fromkeys(
    (
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ),
    _ABSENT,
)
"""Tools that OpenAI's servers run themselves."""
_SERVER_ITEMS = dict.fromkeys(
    (
        "code_interpreter_call",
        "compaction",
        "file_search_call",
        "image_generation_call",
        "item_reference",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    ),
    "the model is not shown what another server's tools did",
)
_FUNCTION = {
    "allowed_callers": "the model is the only caller",
    "defer_loading": "the prompt has all tools",
    "output_schema": "the model is not shown the results' schema",
}
LARK_INPUT = "an input's grammar in Lark cannot stand within a call's JSON; a regex can"
_NAMED = {"request_id": "the header X-Request-Id names a request"}
SAMPLING = FieldClasses(without_effect=_CACHE, not_honoured=_NAMED)
STREAM_OPTIONS = FieldClasses(not_honoured={"include_obfuscation": "chunks are as long as their text"})
COMPLETION = FieldClasses(
    without_effect=_CACHE,
    not_honoured=_NAMED,
    refused={
        **FIELDS["completion"],
        "suffix": "the model continues a text and fills no gaps; an empty one is accepted",
    },
)
CONTENT_PART = FieldClasses()
TOOL_CALL = FieldClasses(without_effect={**_SHOWN, "provider_specific_fields": _UNUSED})
MESSAGE = FieldClasses(
    without_effect={
        "id": _UNUSED,
        "provider_specific_fields": _UNUSED,
        "reasoning_details": "the model is shown reasoning_content",
    },
    refused={"audio": "messages are text", "function_call": "use tool_calls"},
)
TOOL = FieldClasses(not_honoured=_FUNCTION)
RESPONSE_TOOL = FieldClasses(without_effect=_SHOWN, not_honoured=_FUNCTION)
CHAT = FieldClasses(
    without_effect={**_CACHE, "metadata": _UNUSED},
    not_honoured={**_NAMED, "store": "chats are not stored", "web_search_options": "the server cannot search"},
    refused={
        **FIELDS["chat"],
        "audio": "answers are text",
        "chat_template": "it is the model's, or the file of --chat-template",
        "documents": "give them in chat_template_kwargs",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "prediction": "speculation is a setting of the server",
        "moderation": "the server does not moderate",
    },
    items={"tools": _SERVER_TOOLS},
)
INPUT_PART = FieldClasses(without_effect=_SHOWN, refused={"file_id": "there are no files: give image_url"})
INPUT_ITEM = FieldClasses(
    without_effect={
        **_SHOWN,
        "provider_specific_fields": _UNUSED,
        "caller": _UNUSED,
        "phase": _UNUSED,
        "encrypted_content": "the model is shown a thought's content or summary",
    }
)
REASONING = FieldClasses(
    without_effect=dict.fromkeys(("summary", "generate_summary"), "thoughts are returned unchanged"),
)
RESPONSES = FieldClasses(
    without_effect=_CACHE,
    refused={
        **FIELDS["response"],
        "conversation": "use previous_response_id, or send the conversation as input",
        "prompt": "there are no stored prompts",
        "context_management": "use truncation='auto'",
        "max_tool_calls": "parallel_tool_calls=false allows one",
        "moderation": "the server does not moderate",
    },
    items={
        "tools": _SERVER_TOOLS,
        "input": _SERVER_ITEMS,
        "include": {
            "reasoning.encrypted_content": "",
            **dict.fromkeys(
                (
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                    "web_search_call.action.sources",
                    "web_search_call.results",
                ),
                "the server has nothing of this kind to include",
            ),
        },
    },
)
VECTORS = FieldClasses(refused=FIELDS["vectors"])
TOKENIZE = FieldClasses(refused=FIELDS["tokenize"])
TABLE = {
    "chat and completion": SAMPLING,
    "completion": COMPLETION,
    "chat": CHAT,
    "message": MESSAGE,
    "part of a message": CONTENT_PART,
    "tool": TOOL,
    "tool of a response": RESPONSE_TOOL,
    "call in a message": TOOL_CALL,
    "stream_options": STREAM_OPTIONS,
    "response": RESPONSES,
    "item of input": INPUT_ITEM,
    "part of an item": INPUT_PART,
    "reasoning": REASONING,
    "vectors, classes and scores": VECTORS,
    "tokenize": TOKENIZE,
}
"""Every row, by the object that a caller sends."""
