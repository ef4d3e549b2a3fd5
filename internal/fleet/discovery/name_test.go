package discovery

import (
	"net/netip"
	"strings"
	"testing"
)

func TestNamesAreFitToBeShown(t *testing.T) {
	for told, want := range map[string]string{
		"vllm-7d9f8c6b5-x2x9q":              "vllm-7d9f8c6b5-x2x9q",
		"[fd00::1]:8000":                    "[fd00::1]:8000",
		"rack 3, gpu 1":                     "rack 3_ gpu 1",
		" a ":                               "a",
		"a\r\nSet-Cookie: x":                "a__Set-Cookie: x",
		"\x1b[31mred\x7f":                   "_[31mred_",
		`a"b'c` + "`" + `\`:                 "a_b_c__",
		"gr\u00f6\u00dfe \u202e":            "gr__e _",
		"\xff\xfe":                          "__",
		strings.Repeat("x", 300):            strings.Repeat("x", 253),
		strings.Repeat("x", 252) + "\u00f6": strings.Repeat("x", 252) + "_",
		"":                                  "",
	} {
		got := plainName(told)
		if got != want {
			t.Errorf("%q becomes %q, want %q", told, got, want)
		}
	}
	if w := dnsWorker(netip.MustParseAddr("10.0.0.1"), 8000, "a\nb:8000"); w.Name != "a_b:8000" {
		t.Errorf("%+v", w)
	}
	long := pod{name: strings.Repeat("p", 253) + "\n", address: "10.0.0.1", ready: true}
	if list, _ := long.workers(nil, []uint16{1, 2}, true); len(list) != 2 || len(list[1].Name) != maxName || !strings.HasSuffix(list[1].Name, "p-rank-1") {
		t.Errorf("%+v", list)
	}
	list, err := parseFile([]byte("workers: [{url: http://h:1, name: \"a\\nb\"}, {url: http://h:2, name: \" \"}]"))
	if err != nil || len(list) != 2 || list[0].Name != "a_b" || list[1].Name != "h:2" {
		t.Errorf("%+v, %v", list, err)
	}
}
