package testkit

// Streams as vLLM 0.32 sends them for the messages and the responses API.
const (
	MessagesStream = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":0,\"output_tokens\":0}}}\n\n" +
		"event: content_block_delta\ndata: {\"delta\":{\"text\":\"hi\"}}\n\nevent: content_block_stop\ndata: {}\n\n" +
		"event: message_delta\ndata: {\"delta\":{},\"usage\":{\"input_tokens\":5,\"cache_read_input_tokens\":4,\"output_tokens\":3}}\n\n" +
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	ResponsesStream = "event: response.created\ndata: {\"response\":{\"usage\":null}}\n\n" +
		"event: response.output_text.delta\ndata: {\"delta\":\"hi\"}\n\n" +
		"event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":2,\"input_tokens_details\":{\"cached_tokens\":4}}}}\n\n"
)
