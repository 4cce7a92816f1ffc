"""`/` links to pages that are there, `/docs` loads nothing from other hosts, and `/tokenizer_info` shows no paths."""

import re

from jpaged.server.access import Key


def test_the_first_page_links_to_what_is_there(server):
    page = server.http.get("/")
    links = re.findall(r'href="([^"]+)"', page.text)
    assert {"docs", "memory", "metrics"} <= set(links) and "tiny" in page.text
    assert all(server.http.get(f"/{link}").status_code == 200 for link in links)


def test_the_page_of_the_api_comes_from_this_server_alone_and_needs_no_key(serve):
    server = serve(keys=(Key.of("one", "alice"),))
    page = server.http.get("/docs")
    assert (
        page.status_code == 200
        and "http" not in page.text
        and "default-src 'none'" in page.headers["content-security-policy"]
    )
    (script,) = re.findall(r'src="([^"]+)"', page.text)
    drawn = server.http.get(f"/{script}")
    assert drawn.status_code == 200 and "openapi.json" in drawn.text
    assert server.http.get("/openapi.json").status_code == 401


def test_each_path_of_the_document_lists_its_errors(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    statuses = {
        path: {method: set(one["responses"]) for method, one in methods.items()} for path, methods in paths.items()
    }
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert {"200", "400", "401", "404", "409", "413", "429", "500", "503", "504"} <= statuses[path]["post"]
    assert {"401", "403"} <= statuses["/metrics"]["get"] and "503" in statuses["/health"]["get"]
    assert "401" not in statuses["/health"]["get"]
    assert not any("422" in one for methods in statuses.values() for one in methods.values())
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


def test_the_tokenizers_facts_are_shown_if_the_server_is_to_show_them(server):
    assert server.http.get("/tokenizer_info").status_code == 404


def test_lm_evals_remote_tokenizer_finds_what_it_reads(serve, tiny_llm, tiny_folder):
    server = serve(tokenizer_info=True)
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "</s>" and info["chat_template"] == tiny_llm.tokenizer.chat_template
    assert tiny_folder not in str(info) and "path" not in str(info)
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert server.answer("/tokenize", asked)["tokens"] == [tiny_llm.tokenizer.eos_token_id]
