package health

import (
	"math/rand/v2"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
)

// TestAWorkerThatMissesItsChecksIsAvoided until it answers anything.
func TestAWorkerThatMissesItsChecksIsAvoided(t *testing.T) {
	at := time.Unix(1000, 0)
	random := rand.New(rand.NewPCG(1, 1))
	key, other := kv.WorkerKey{Worker: 1}, kv.WorkerKey{Worker: 2}
	begin := func() *Detector {
		d := New(Settings{EjectAfter: 3, EjectionTime: time.Second, MaxEjectionTime: time.Second, MaxEjectionPercent: 50})
		d.Join(key, 1, kv.RoleBoth, at)
		d.Join(other, 1, kv.RoleBoth, at)
		if lived, _ := d.Missed(1, 1, at); !lived.IsZero() {
			t.Errorf("it lived at %s", lived)
		}
		return d
	}
	attempt := Attempt{Worker: key, Generation: 1, Sent: at, Client: "a"}
	for _, test := range []struct {
		name    string
		happens func(*Detector)
		avoided bool
	}{
		{"nothing", func(*Detector) {}, true},
		{"another incarnation answers", func(d *Detector) { d.AnswersChecks(1, 2) }, true},
		{"it answers checks", func(d *Detector) { d.AnswersChecks(1, 1) }, false},
		{"it begins an answer", func(d *Detector) { d.Heard(attempt, at.Add(time.Second)) }, false},
		{"its engine shows progress", func(d *Detector) { d.Lives(key, 1, at.Add(time.Second)) }, true},
	} {
		d := begin()
		test.happens(d)
		now := at.Add(2 * time.Second)
		if avoided := d.Level(key, now, random) > Slow; avoided != test.avoided || d.IsOut(key, now) != avoided || d.Quiet() == avoided {
			t.Errorf("%s: avoided %v", test.name, avoided)
		}
		if d.Level(other, now, random) != In || d.Ejected(key, now) {
			t.Errorf("%s: the other is avoided, or it is ejected", test.name)
		}
	}
	d := begin()
	d.Lives(key, 1, at.Add(time.Second))
	if lived, _ := d.Missed(1, 1, at); !lived.Equal(at.Add(time.Second)) {
		t.Errorf("lived at %s", lived)
	}
	d = begin()
	d.Heard(attempt, at.Add(time.Second))
	if d.Missed(1, 1, at); d.IsOut(key, at.Add(time.Second)) {
		t.Error("it has answered since, and is avoided")
	}
}
