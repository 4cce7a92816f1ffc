"""A choice, a pattern, a schema and a grammar."""

import json
import re
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MODEL, SETTINGS = sys.argv[1], json.loads(sys.argv[2])
sql = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "

table ::= "table_1 " | "table_2 "

condition ::= column "= " number

number ::= "1 " | "2 "
"""
schema = {"type": "object", "properties": {"car": {"enum": ["SUV", "Van"]}}, "required": ["car"]}
schema["additionalProperties"] = False
params = [
    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"])),
    SamplingParams(
        structured_outputs=StructuredOutputsParams(regex=r"[a-z]{1,5}@\w{1,5}\.com\n"), stop=["\n"], max_tokens=50
    ),
    SamplingParams(structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True), max_tokens=60),
    SamplingParams(structured_outputs=StructuredOutputsParams(grammar=sql), max_tokens=80, min_tokens=2),
]
llm = LLM(model=MODEL, **SETTINGS)
prompts = ["Good or bad?", "An address:", "A car:", "A query:"]
texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
RESULT = [
    texts[0] in ("Positive", "Negative"),
    bool(re.fullmatch(r"[a-z]{1,5}@\w{1,5}\.com", texts[1])),
    json.loads(texts[2])["car"] in ("SUV", "Van"),
    bool(re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", texts[3])),
]
EXPECTED = [True] * 4
