package tokens

import (
	"context"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// Kind is the position of the prompt in a route's body.
type Kind int

// Values of Kind.
const (
	NoPrompt         Kind = iota // routed by load alone
	ChatPrompt                   // in messages
	CompletionPrompt             // in prompt
	WorkerPrompt                 // in a form that only a worker renders
	GeneratePrompt               // in text or input_ids
	TokensPrompt                 // in token_ids
)

// Pairs reports whether requests of the kind may be served by a prefill and a decode worker.
func (k Kind) Pairs() bool { return k != NoPrompt }

// TokensRoute is vLLM's route for prompts in tokens, which is answered in tokens.
const TokensRoute = "/inference/v1/generate"

// Routes are the engines' inference paths: each request goes to one worker.
var Routes = map[string]Kind{
	"/v1/chat/completions":          ChatPrompt,
	"/v1/completions":               CompletionPrompt,
	GenerateRoute:                   GeneratePrompt,
	"/v1/responses":                 WorkerPrompt,
	"/v1/messages":                  WorkerPrompt,
	"/v1/messages/count_tokens":     NoPrompt,
	"/v1/chat/completions/render":   NoPrompt,
	"/v1/completions/render":        NoPrompt,
	"/v1/responses/render":          NoPrompt,
	"/v1/messages/render":           NoPrompt,
	"/v1/embeddings":                NoPrompt,
	"/v2/embed":                     NoPrompt,
	"/pooling":                      NoPrompt,
	"/classify":                     NoPrompt,
	"/score":                        NoPrompt,
	"/v1/score":                     NoPrompt,
	"/rerank":                       NoPrompt,
	"/v1/rerank":                    NoPrompt,
	"/v2/rerank":                    NoPrompt,
	"/v1/audio/transcriptions":      NoPrompt,
	"/v1/audio/translations":        NoPrompt,
	"/v1/audio/speech":              NoPrompt,
	"/v1/images/generations":        NoPrompt,
	"/v1/images/edits":              NoPrompt,
	"/v1/chat/completions/batch":    NoPrompt,
	"/v1/chat/completions/derender": NoPrompt,
	"/v1/completions/derender":      NoPrompt,
	"/generative_scoring":           NoPrompt,
	TokensRoute:                     TokensPrompt,
	InvocationsRoute:                NoPrompt, // see Invoked
	"/cohere/v2/chat":               NoPrompt,
	"/cohere/v2/chat/render":        NoPrompt,
	"/v1/systemone":                 NoPrompt,
	"/v1/decisions":                 NoPrompt,
	"/v1/classify":                  NoPrompt,
	"/encode":                       NoPrompt,
	"/parse_function_call":          NoPrompt,
	"/separate_reasoning":           NoPrompt,
}

// InvocationsRoute is SageMaker's route, on which engines answer requests of several routes.
const InvocationsRoute = "/invocations"

// Invoked returns the route whose request a body of InvocationsRoute is, as vLLM finds it.
func Invoked(body *jsonbody.Body) (route string, kind Kind) {
	switch {
	case body.Get("messages").Exists():
		route = "/v1/chat/completions"
	case body.Get("prompt").Exists():
		route = "/v1/completions"
	default:
		route = InvocationsRoute
	}
	return route, Routes[route]
}

// tokensBody returns the prompt of a body of TokensRoute, which has the form of a render route's answer. Media that the
// engine is to fetch take as many tokens as it finds.
func (t *Source) tokensBody(body *jsonbody.Body) Prompt {
	const shape = "tokens"
	p, ok := readRendered(gjson.ParseBytes(body.Raw), shape)
	if !ok || body.Get("content_parts").IsArray() && !isEmptyList(body.Get("content_parts")) {
		t.countReason(reasonNotRenderable)
		return t.unknown(shape)
	}
	t.local.Add(1)
	p.Source = SourceLocal
	return p
}

// Prompts returns the tokens of the prompts in a body of that kind; NoPrompt has
// none.
func (t *Source) Prompts(ctx context.Context, kind Kind, path string, body *jsonbody.Body) []Prompt {
	switch kind {
	case ChatPrompt:
		return []Prompt{t.ChatBody(ctx, body)}
	case WorkerPrompt:
		return []Prompt{t.Other(ctx, path, body.Raw)}
	case CompletionPrompt:
		return t.CompletionBody(ctx, body)
	case GeneratePrompt:
		return t.GenerateBody(ctx, body)
	case TokensPrompt:
		return []Prompt{t.tokensBody(body)}
	}
	return nil
}
