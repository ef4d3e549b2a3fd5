package tokens

import (
	"cmp"
	"context"
	"log/slog"

	"kvrouter/internal/prompt/chat"
)

// Opening selects the model's files and the engine's settings for Open.
type Opening struct {
	Name, Python string      // the model, a name or a folder; the Python that resolves a name
	EngineArgs   []string    // arguments of started workers, some of which change the chat template
	SGLang       bool        // they are SGLang's
	CacheTokens  int         // capacity of the token cache; 0: none
	Limits       chat.Limits // of the files; the zero value means chat.DefaultLimits
}

// Open opens the tokenizer and the chat template of a model.
func Open(ctx context.Context, o Opening, log *slog.Logger) (*Model, error) {
	dir, err := chat.Resolve(ctx, o.Name, o.Python)
	if err != nil {
		return nil, err
	}
	read := chat.VLLMOptions
	if o.SGLang {
		read = chat.SGLangOptions
	}
	options, err := read(o.EngineArgs)
	if err != nil {
		return nil, err
	}
	model, err := openModel(dir, options, cmp.Or(o.Limits, chat.DefaultLimits))
	if err != nil {
		return nil, err
	}
	model.CacheTokens(o.CacheTokens)
	if name, why := model.Encoder(); why != "" {
		log.Info("encoding prompts with crate "+name+", not with the faster fastokens", "why", why)
	}
	if why := model.Problem(); why != "" {
		log.Warn("the chat template is not used: workers render the chats", "folder", dir, "why", why)
	}
	return model, nil
}
