package directives

import (
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// media are the top members that may have images, videos and recordings in them, each with the
// names of those: a string, or an object with a url.
var media = map[string]map[string]bool{
	"messages":  set("image_url", "video_url", "audio_url", "source"),
	"input":     set("image_url", "video_url", "audio_url", "image", "video", "audio"),
	"query":     set("image_url", "video_url", "audio_url", "image", "video", "audio"),
	"documents": set("image_url", "video_url", "audio_url", "image", "video", "audio"),
}

// loaded are the top members that are such, or lists of them.
var loaded = set("image_data", "video_data", "audio_data")

// loadedDepth bounds the depth of those lists: some for each prompt.
const loadedDepth = 2

// FindFile returns the top member of a body by which an SGLang server would open a file of its
// machine; empty: there is none. vLLM has --allowed-local-media-path for that.
func FindFile(body *jsonbody.Body) (member string) {
	body.Each(func(m jsonbody.Member) bool {
		if loaded[m.Key] && loads(m.Value, loadedDepth) || media[m.Key] != nil && opens(m.Value.Raw, media[m.Key], false) {
			member = m.Key
		}
		return member == ""
	})
	return member
}

// loads reports whether media of a loaded member are in a file.
func loads(v gjson.Result, depth int) (file bool) {
	switch {
	case v.Type == gjson.String:
		return isFile(v.Str)
	case v.IsObject():
		return opens(v.Raw, nil, true)
	case v.IsArray() && depth == 0:
		return true // no server takes it
	case v.IsArray():
		jsonbody.EachElement(v.Raw, func(one gjson.Result) bool {
			file = loads(one, depth-1)
			return !file
		})
	}
	return file
}

// opens reports whether one of the media with those names in a JSON text is in a file. inside
// means that the text itself is one.
func opens(text string, names map[string]bool, inside bool) (file bool) {
	jsonbody.EachName(text, func(name, rest string) bool {
		switch {
		case names[name]:
			inside = strings.HasPrefix(rest, "{")
		case inside && name == "url":
			inside = false
		case name == "data": // it has no url
			inside = false
			return true
		default:
			return true
		}
		if strings.HasPrefix(rest, `"`) {
			file = isFile(gjson.Parse(rest).Str)
		}
		return !file
	})
	return file
}

const (
	// longestPath is the longest path of a file on Linux, bytes.
	longestPath = 4096
	// shortestMedia is the shortest base64 text of an image, bytes.
	shortestMedia = 64
	// jpeg begins the base64 text of a JPEG image.
	jpeg = "/9j/"
)

// isFile reports whether a reference to media may be the path or the URL of a file: not of another
// scheme than that, nor base64.
func isFile(reference string) bool {
	for _, scheme := range []string{"http://", "https://", "data:"} {
		if strings.HasPrefix(reference, scheme) {
			return false
		}
	}
	switch {
	case reference == "", len(reference) > longestPath && !strings.Contains(reference, "://"):
		return false
	case strings.HasPrefix(reference, "/"):
		return !strings.HasPrefix(reference, jpeg)
	}
	return len(reference) < shortestMedia || strings.ContainsAny(reference, ".:")
}
