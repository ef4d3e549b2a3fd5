// Package settings reads flags from a YAML file and detects the resources of the machine.
package settings

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/goccy/go-yaml"

	"kvrouter/internal/base/textfile"
)

// Limits of a file of settings: its size, bytes, and the entries of its lists and mappings.
const configLimit, configEntries = 1 << 20, 1 << 16

// argsKeys are the keys of the file of settings that are no flags: arguments for an
// engine, after its name.
var argsKeys = []string{"vllm" + argsEnd, "sglang" + argsEnd}

const argsEnd = "-args"

// File holds the settings of a YAML file, by flag name, as the text (or
// list of texts) that the flag would get on the command line.
type File struct {
	name   string
	values map[string]any
	args   map[string][]string // by key
}

// EngineArgs returns the file's arguments for an engine. For an engine without
// arguments it returns those of all engines, so that they are refused.
func (f File) EngineArgs(engine string) (args []string) {
	for _, key := range argsKeys {
		if key == engine+argsEnd || !slices.Contains(argsKeys, engine+argsEnd) {
			args = append(args, f.args[key]...)
		}
	}
	return args
}

// ReadConfigFile reads the file of --config; an empty name gives an empty file. An
// unknown key is an error: a misspelled one would have no effect.
func ReadConfigFile(name string, flags []*kong.Flag) (File, error) {
	file := File{name: name, values: map[string]any{}, args: map[string][]string{}}
	if name == "" {
		return file, nil
	}
	data, err := textfile.Read(name, configLimit)
	if err == nil {
		err = textfile.BoundYAML(data, configEntries)
	}
	if err != nil {
		return file, fmt.Errorf("--config %s: %w", name, err)
	}
	var entries yaml.MapSlice
	if err := yaml.UnmarshalWithOptions(data, &entries, yaml.UseOrderedMap()); err != nil {
		message, _, _ := strings.Cut(yaml.FormatError(err, false, false), "\n")
		return file, fmt.Errorf("--config %s: not a YAML map of settings: %s", name, message)
	}

	known := slices.Clone(argsKeys)
	for _, flag := range flags {
		if flag.Name != "help" && flag.Name != "config" {
			known = append(known, flag.Name)
		}
	}
	for _, entry := range entries {
		key := fmt.Sprint(entry.Key)
		flag := strings.ReplaceAll(key, "_", "-")
		if !slices.Contains(known, flag) {
			return file, fmt.Errorf("--config %s: %w", name, UnknownKey(key, known))
		}
		if _, twice := file.values[flag]; twice {
			return file, fmt.Errorf("--config %s: %s is set twice", name, flag)
		}
		value, err := settingText(entry.Value)
		if err != nil {
			return file, fmt.Errorf("--config %s: %s: %w", name, flag, err)
		}
		if !slices.Contains(argsKeys, flag) {
			file.values[flag] = value
			continue
		}
		list, isList := value.([]any)
		if !isList {
			return file, fmt.Errorf("--config %s: %s must be a list, such as [--max-model-len, 4096]", name, flag)
		}
		for _, item := range list {
			file.args[flag] = append(file.args[flag], item.(string))
		}
	}
	return file, nil
}

// settingText turns a YAML value into what kong would read from the command
// line: a text, or a list of texts. A map is written key=value,... as --worker
// takes it.
func settingText(value any) (any, error) {
	switch v := value.(type) {
	case nil:
		return nil, errors.New("has no value")
	case []any:
		texts := make([]any, 0, len(v))
		for _, item := range v {
			text, err := settingText(item)
			if err != nil {
				return nil, err
			}
			if _, nested := text.([]any); nested {
				return nil, errors.New("is a list of lists")
			}
			texts = append(texts, text)
		}
		return texts, nil
	case yaml.MapSlice:
		parts := make([]string, 0, len(v))
		for _, entry := range v {
			text := fmt.Sprint(entry.Value)
			if list, is := entry.Value.([]any); is {
				items := make([]string, len(list))
				for i := range list {
					items[i] = fmt.Sprint(list[i])
				}
				text = strings.Join(items, ",")
			}
			parts = append(parts, fmt.Sprintf("%v=%s", entry.Key, text))
		}
		return strings.Join(parts, ","), nil
	default:
		return fmt.Sprint(v), nil
	}
}

// Resolve returns the file's value of a flag to kong. An environment variable
// overrides it.
func (f File) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	for _, variable := range flag.Envs {
		if _, set := os.LookupEnv(variable); set {
			return nil, nil
		}
	}
	return f.values[flag.Name], nil
}

// Explain adds the file's name to an error about a flag that the file sets, and
// returns any other error as it is.
func (f File) Explain(err error) error {
	if err == nil {
		return nil
	}
	for key := range f.values {
		if strings.HasPrefix(err.Error(), "--"+key+":") || strings.HasPrefix(err.Error(), "--"+key+" ") {
			return fmt.Errorf("%w (%s is set in %s)", err, key, f.name)
		}
	}
	return err
}

// UnknownKey returns the error about a key that is not among known. It names the nearest known
// one, if any is near.
func UnknownKey(key string, known []string) error {
	if nearest := Nearest(key, known); nearest != "" {
		return fmt.Errorf("unknown key %q; did you mean %q?", key, nearest)
	}
	return fmt.Errorf("unknown key %q", key)
}

// Nearest returns the known word that is most like word; empty: more than two letters differ, and
// more than a third, in each.
func Nearest(word string, known []string) (nearest string) {
	return NearestWithin(word, known, max(2, len(word)/3))
}

// NearestWithin is Nearest of words that differ in so many letters at most.
func NearestWithin(word string, known []string, least int) (nearest string) {
	for _, k := range known {
		if distance := editDistance(word, k); distance < least || distance == least && nearest == "" {
			nearest, least = k, distance
		}
	}
	return nearest
}

// editDistance is Levenshtein's: letters inserted, deleted or replaced.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
