package health

import (
	"testing"
	"time"
)

func TestARequestIsTriedAsOftenAsItMay(t *testing.T) {
	now, tries, b := time.Unix(1_000_000, 0), Tries{}, NewBudget(0)
	for i := range 3 {
		again, denied := tries.Again(b, "", 2, false, now)
		if again != (i < 2) || denied != "" {
			t.Errorf("retry %d: %v, denied %q", i+1, again, denied)
		}
	}
	for b.Take("", now) == "" { // nothing is left
	}
	tries = Tries{}
	if again, denied := tries.Again(b, "", 2, false, now); again || denied != DeniedTotal {
		t.Error("a retry beyond the budget")
	}
	if again, _ := tries.Again(b, "", 2, true, now); !again {
		t.Error("a retry of a request whose worker is out was counted")
	}
	for i := range maxLettings + 1 {
		if tries.LetGo(2) != (i < maxLettings) {
			t.Errorf("taken off a worker for the time %d", i+1)
		}
	}
	if (&Tries{}).LetGo(0) {
		t.Error("without retries it is not sent again")
	}
}
