"""A server that speaks TLS: answers, streams, gRPC's and the admin API's ports, and a certificate that changes
(reliability 1.18)."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import httpx
import pytest

from tests.api.serving import eventually, serving
from tests.front.server.http.test_tls import write_certificate

ADMIN = "tls-admin"
BODY = {"prompt": "fox", "max_tokens": 8, "stream": True}


def trusted(path: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(path))
    return context


@pytest.mark.slow
def test_a_certificate_changes_under_a_running_server(model: Path, tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_certificate(tmp_path, name)
    paths = tmp_path / "server.pem", tmp_path / "server.key"
    for path in paths:
        path.write_bytes((tmp_path / f"old{path.suffix}").read_bytes())
    tls = ("--ssl-certfile", str(paths[0]), "--ssl-keyfile", str(paths[1]))
    admin = ("--admin-key", ADMIN, "--admin-listen", "127.0.0.1:0")
    with serving(model, *tls, *admin, "--grpc-port", "0") as served:
        url = served.url
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusted(tmp_path / "old.pem")) as kept:
            assert kept.get(url + "/health/ready").status_code == 200
            text = kept.post(url + "/v1/completions", json=BODY).text
            assert text.endswith("data: [DONE]\n\n")
            (at,) = [
                m[1] for line in served.lines if (m := re.search(r"administration: (\S+)", line))
            ]
            assert kept.get(at + "health", headers={"x-api-key": ADMIN}).status_code == 200
            for path in paths:
                path.write_bytes((tmp_path / f"new{path.suffix}").read_bytes())

            def is_new() -> bool:
                try:
                    answer = httpx.get(url + "/version", verify=trusted(tmp_path / "new.pem"))
                except httpx.ConnectError:
                    return False
                return answer.status_code == 200

            eventually(is_new, within_s=10)
            assert kept.get(url + "/health/ready").status_code == 200  # the connection goes on
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/version", verify=trusted(tmp_path / "old.pem"))
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https", "http") + "/version")
        grpc = pytest.importorskip("grpc")
        health = pytest.importorskip("grpc_health.v1")
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        assert health is not None
        (port,) = [m[1] for line in served.lines if (m := re.search(r"gRPC: \S+:(\d+)", line))]
        credentials = grpc.ssl_channel_credentials((tmp_path / "new.pem").read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert served.stop() == 0
