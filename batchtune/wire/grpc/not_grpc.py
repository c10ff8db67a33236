"""What do we tell a client that found the gRPC port but speaks something else?"""

from __future__ import annotations

from batchtune.wire.grpc.request_head import RequestHead
from batchtune.wire.grpc.server_writer import AnswerWriter
from batchtune.wire.http2.header_blocks import encode_block

_TEXT = b"This port speaks gRPC (HTTP/2 with prior knowledge) only.\n"

HTTP1_ANSWER = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)


def refuse(writer: AnswerWriter, stream_id: int, head: RequestHead) -> None:
    """Answer a request that is no gRPC call with an HTTP status and a line of text; its body will be ignored."""
    text = b"" if head.method == "HEAD" else _TEXT
    fields = [
        (":status", head.http_status),
        ("content-type", "text/plain"),
        ("content-length", str(len(text))),
    ]
    writer.send_text(stream_id, encode_block(fields), text)
