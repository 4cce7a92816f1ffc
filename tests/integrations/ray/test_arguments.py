"""What an application of replicas is told: unknown and contradictory arguments are refused before anything starts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from jpaged.integrations.ray import RayArguments, app


def test_each_argument_reaches_its_deployment():
    arguments = RayArguments(
        model="m",
        engine={"max_num_seqs": 8},
        server={"max_waiting": 10, "drain_seconds": 7, "health_timeout": 3},
        min_replicas=1,
        max_replicas=4,
        upscale_delay_s=5,
        downscale_delay_s=50,
        fronts=2,
        resources={"num_cpus": 2},
    )
    front = app(arguments)._bound_deployment
    replica = front.init_args[0]._bound_deployment
    config = replica._deployment_config
    assert front.num_replicas == 2
    scaling = config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 6)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (5, 50)
    assert config.max_ongoing_requests == 18
    assert (config.graceful_shutdown_timeout_s, config.health_check_timeout_s) == (7, 8)
    assert replica.ray_actor_options == {"num_cpus": 2}
    router = config.request_router_config
    assert router.request_router_class == "jpaged.integrations.ray.router:PrefixRouter"
    assert router.request_router_kwargs == {"overload": 4, "max_chunks": 65536}


def test_the_file_of_the_page_on_replicas_is_taken(tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "replicas.md").read_text()
    (application,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])["applications"]
    assert application["import_path"] == "jpaged.integrations.ray:app"
    keys = tmp_path / "keys.json"
    keys.write_text('[{"name": "team-a", "key": "a-long-enough-key"}]')
    assert application["args"]["api_keys_file"] == "/keys/keys.json"
    app(RayArguments(**application["args"] | {"api_keys_file": str(keys)}))


def test_answer_formats_are_named_or_found():
    assert RayArguments(model="m").formats == {}
    named = RayArguments(model="m", server={"tool_parser": "hermes", "reasoning_parser": "none"})
    assert named.formats == {"tool_parser": "hermes", "reasoning_parser": "none"}
    assert (named.settings().tool_parser, named.settings().reasoning_parser) == ("hermes", None)
    assert RayArguments(model="m", server={"tool_parser": None}).formats == {"tool_parser": "none"}


def test_replicas_may_be_chosen_by_load_alone_and_their_number_may_be_fixed():
    front = app(RayArguments(model="m", min_replicas=3, max_replicas=3, routing="load"))._bound_deployment
    replica = front.init_args[0]._bound_deployment
    config = replica._deployment_config
    assert replica.num_replicas == 3 and config.autoscaling_config is None
    assert config.request_router_config.request_router_class == "jpaged.integrations.ray.router:LoadRouter"
    assert not config.request_router_config.request_router_kwargs


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"replicas": 2}, "replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas=2"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"server": {"state_dir": "here"}}, "state_dir"),
        ({"server": {"ports": 1}}, "ports"),
        ({"server": {"host": "0.0.0.0"}}, "there is no key"),
        ({"overload": -1}, "overload"),
        ({"routing": "random"}, "routing"),
    ],
)
def test_a_wrong_argument_is_named(wrong, named):
    with pytest.raises(ValidationError, match=named):
        RayArguments(model="m", **wrong)


def test_serves_own_command_line_and_config_files_reach_the_application():
    """`serve run jpaged.integrations.ray:app model=m ...` has texts for values."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as called

    built = called(app, {"model": "m", "min_replicas": "2", "max_replicas": "2", "warmup": "false"})
    replica = built._bound_deployment.init_args[0]._bound_deployment
    assert replica.num_replicas == 2 and replica.init_args[0].warmup is False


def test_keys_come_from_a_file(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([{"name": "team", "key": "k"}]))
    settings = RayArguments(model="m", api_keys_file=file, server={"host": "0.0.0.0"}).settings()
    assert [key.name for key in settings.keys] == ["team"]


def test_the_name_of_0_2_warns_and_is_the_package_of_today():
    sys.modules.pop("jpaged.server.ray", None)
    with pytest.warns(DeprecationWarning, match="is jpaged.integrations.ray") as said:
        from jpaged.server.ray import RayArguments as former
    assert former is RayArguments and said[0].filename == __file__
