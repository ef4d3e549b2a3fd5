package batch

import (
	"strings"
	"testing"
	"time"
)

func TestTheProgressFitsItsLine(t *testing.T) {
	began := time.Unix(1000, 0)
	c := counts{total: 1000, before: 200, ok: 240, errors: 10, failed: 12, started: began, last: "\x1b[2Jstatus 503" + strings.Repeat(" and so on", 20)}
	now := began.Add(25 * time.Second)
	if got := c.line(now, 32, true); len([]rune(got)) != width || !strings.HasPrefix(got, "█████████░░░░░░░░░░░ 45% 450/1000, 12 errors, 32 in flight, 10.0/s, 55s left") {
		t.Errorf("%d columns: %s", len([]rune(got)), got)
	}
	if got := c.line(now, 32, false); !strings.HasPrefix(got, "45% 450/1000") || !strings.Contains(got, "last problem: [2Jstatus 503 and") {
		t.Error(got)
	}
	empty := counts{started: began}
	if got := empty.line(began, 0, true); !strings.Contains(got, "100% 0/0") {
		t.Error(got)
	}
}
