package chat

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// Options are the engine's own settings that change its prompts.
type Options struct {
	// ChatTemplate replaces the model's template (--chat-template); its text.
	ChatTemplate string
	// ContentFormat is --chat-template-content-format: "string", "openai", or
	// "auto" or empty to detect it.
	ContentFormat string
	// ExcludeToolsWhenNone is --exclude-tools-when-tool-choice-none.
	ExcludeToolsWhenNone bool
	// DefaultKwargs are the members of --default-chat-template-kwargs.
	DefaultKwargs []jsonbody.Field
	// CannotRender is the reason why prompts cannot be computed locally; empty
	// if they can.
	CannotRender string
}

// VLLMOptions reads the arguments of vLLM that change prompts. An unsupported one
// sets CannotRender, so that workers tokenize the prompts.
func VLLMOptions(args []string) (Options, error) {
	var o Options
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		if !strings.HasPrefix(name, "--") {
			continue
		}
		name = strings.ReplaceAll(name, "_", "-")
		switch name {
		case "--exclude-tools-when-tool-choice-none":
			o.ExcludeToolsWhenNone = true
			continue
		case "--no-exclude-tools-when-tool-choice-none":
			o.ExcludeToolsWhenNone = false
			continue
		case "--enable-prompt-embeds":
			o.CannotRender = "the engine runs with --enable-prompt-embeds"
			continue
		case "--chat-template", "--chat-template-content-format", "--default-chat-template-kwargs", "--tokenizer",
			"--tokenizer-mode", "--tokenizer-revision":
		default:
			continue
		}
		if !inline {
			if i++; i >= len(args) {
				return o, fmt.Errorf("the engine's argument %s needs a value", name)
			}
			value = args[i]
		}
		switch name {
		case "--chat-template":
			o.setTemplate(value)
		case "--chat-template-content-format":
			o.ContentFormat = value
		case "--default-chat-template-kwargs":
			if err := o.addKwargs(name, value); err != nil {
				return o, err
			}
		case "--tokenizer-mode":
			if value != "auto" && value != "hf" {
				o.CannotRender = "the engine runs with --tokenizer-mode " + value
			}
		default:
			o.CannotRender = "the engine runs with " + name
		}
	}
	return o, nil
}

// addKwargs adds the members of a JSON object, the value of the named argument.
func (o *Options) addKwargs(name, value string) error {
	parsed := gjson.Parse(value)
	if !json.Valid([]byte(value)) || !parsed.IsObject() {
		return fmt.Errorf("the engine's argument %s needs a JSON object, not %q", name, value)
	}
	o.DefaultKwargs = append(o.DefaultKwargs, fieldsOf(parsed)...)
	return nil
}

// setTemplate takes a file or the text of a template, as vLLM does.
func (o *Options) setTemplate(value string) {
	if text, err := ReadFile(value, maxConfig); err == nil {
		o.ChatTemplate = string(text)
	} else if strings.ContainsAny(value, "{}\n") {
		o.ChatTemplate = value
	} else {
		o.CannotRender = "the engine's --chat-template " + value + " is not a file here"
	}
}

// SGLangOptions reads the arguments of SGLang that change prompts. An unsupported
// one sets CannotRender, so that workers tokenize the prompts.
func SGLangOptions(args []string) (Options, error) {
	var o Options
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		name = strings.ReplaceAll(name, "_", "-")
		switch name {
		case "--chat-template", "--default-chat-template-kwargs", "--completion-template", "--hf-chat-template-name", "--tokenizer-path",
			"--tokenizer-mode", "--reasoning-parser":
		default:
			continue
		}
		if !inline {
			if i++; i >= len(args) {
				return o, fmt.Errorf("the engine's argument %s needs a value", name)
			}
			value = args[i]
		}
		switch name {
		case "--default-chat-template-kwargs":
			if err := o.addKwargs(name, value); err != nil {
				return o, err
			}
		case "--chat-template":
			o.setTemplate(value)
			if !strings.HasSuffix(value, ".jinja") {
				o.ChatTemplate, o.CannotRender = "", "the engine runs with --chat-template "+value
			}
			o.ChatTemplate = strings.ReplaceAll(strings.Trim(o.ChatTemplate, "\n"), `\n`, "\n")
		case "--tokenizer-mode":
			if value != "auto" {
				o.CannotRender = "the engine runs with --tokenizer-mode " + value
			}
		case "--reasoning-parser": // changes nothing but what follows a continued message
		default:
			o.CannotRender = "the engine runs with " + name
		}
	}
	return o, nil
}
