"""Are compressed requests inflated without holding up the event loop, and within bounds?"""

from __future__ import annotations

import asyncio
import gzip

import pytest

from batchtune.wire.grpc import inflating as grpc_inflating
from batchtune.wire.grpc.server_limits import ServerLimits
from tests.wire.wire_peers import H2Client, ServerUnderTest, grpc_message


@pytest.mark.parametrize("size", [100, 2_000_000])
def test_what_inflates_to_much_is_inflated_off_the_event_loop(size: int) -> None:
    async def scenario() -> None:
        server = ServerUnderTest(limits=ServerLimits(max_inflated_bytes=2_000_000))
        client = H2Client(server)
        stream = client.request(
            raw=grpc_message(bytes(size), compress=True), extra=[("grpc-encoding", "gzip")]
        )
        gone = client.request(
            raw=grpc_message(bytes(2_000_000), compress=True), extra=[("grpc-encoding", "gzip")]
        )
        large = client.request(
            raw=grpc_message(bytes(2_000_001), compress=True), extra=[("grpc-encoding", "gzip")]
        )
        client.h2.reset_stream(gone)
        await client.exchange()
        assert len(server.calls) == (size == 100)
        await inflated()
        await client.exchange()
        assert [call.message for call in server.calls] == [bytes(size)]
        assert client.status(large)["grpc-status"] == "8"
        server.calls[0].reply(b"done")
        await client.exchange()
        assert client.status(stream)["grpc-status"] == "0"
        writer = server.connection._writer
        assert writer is not None
        assert (writer.zombies, writer.held_bytes, len(writer.streams)) == (0, 0, 0)

    asyncio.run(scenario())


async def inflated() -> None:
    while grpc_inflating._waiting_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_compressed_requests_that_wait_to_be_inflated_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(grpc_inflating, "_WAITING_BYTES_MAX", 5_000)
        server = ServerUnderTest()
        client = H2Client(server)
        body = grpc_message(bytes(2_000_000), compress=True)
        assert len(gzip.compress(bytes(2_000_000))) < 5_000 < 3 * len(body)
        streams = [client.request(raw=body, extra=[("grpc-encoding", "gzip")]) for _ in range(4)]
        await client.exchange()
        assert "8" in {client.status(stream).get("grpc-status") for stream in streams}
        await inflated()

    asyncio.run(scenario())
