package mocker

import "kvrouter/internal/engine"

// Handover returns the settings' handover.
func (c *Settings) Handover() engine.Handover {
	return engine.Handover{Bandwidth: c.MockKVTransferBandwidth, BytesPerToken: c.MockKVBytesPerToken}
}
