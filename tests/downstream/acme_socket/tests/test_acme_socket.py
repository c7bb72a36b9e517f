"""The kit's laws, put to this channel."""

from kvferry.testing.conformance import ChannelConformance, ManifestConformance


class TestAcmeManifest(ManifestConformance):
    plugin = "acme_socket"


class TestAcmeChannel(ChannelConformance):
    plugin = "acme_socket"
    channel = "socket"
    subject = "acme_socket.subject:make"
