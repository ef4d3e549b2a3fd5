package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"kvrouter/internal/decide/health"
)

// Settings are the flags of retries and of disaggregated requests.
type Settings struct {
	PrefillSettings
	DisaggPrefillTimeout  time.Duration `group:"Disaggregation" hidden:"" default:"60s" help:"Maximum time from sending a prompt to a prefill worker to the end of its answer."`
	DisaggHandoverTimeout time.Duration `group:"Disaggregation" hidden:"" default:"60s" help:"Maximum time from the end of the prefill worker's answer to the first event of the decode worker's stream. With SGLang, an answer that is not streamed must be complete by then, plus 1 s for each token that the request allows (max_tokens); without such a limit only --request-timeout applies."`
	EnforceDisagg         bool          `group:"Disaggregation" help:"Refuse requests whose prompt no prefill worker can compute, instead of sending them to a decode worker."`

	health.RetrySettings
	MigrationLimit    int           `group:"Failing workers" default:"3" help:"Maximum number of times that a streamed answer is continued on another worker after its worker fails. 0 disables it."`
	DrainMigrateAfter time.Duration `group:"Failing workers" default:"20s" help:"Time after which the streams of a cordoned or draining worker are continued on other workers. 0 lets them end there."`

	// PassAborts passes on answers that a vLLM worker has aborted, instead of trying another one: trainers abort, and send the
	// rest again themselves.
	PassAborts bool `kong:"-"`

	// RequestTimeout is the maximum wait for a worker's next byte, and for the
	// client to read it; 0: no limit. OutputBlocks books the blocks of streams as
	// they grow. Both come from flags of other packages.
	RequestTimeout time.Duration `kong:"-"`
	OutputBlocks   bool          `kong:"-"`
}

// PrefillSettings say which prompts go to a prefill worker.
type PrefillSettings struct {
	DisaggMinUncachedTokens int `group:"Disaggregation" default:"256" help:"Minimum number of uncached prompt tokens for which a prefill worker is used; a decode worker computes fewer itself."`
}

// Validate checks the setting; its error names the flag.
func (k PrefillSettings) Validate() error {
	if k.DisaggMinUncachedTokens < 0 {
		return errors.New("--disagg-min-uncached-tokens cannot be negative: 0 sends every prompt to prefill workers")
	}
	return nil
}

// maxMigrations is the maximum of --migration-limit.
const maxMigrations = 100

// Validate checks the settings; its errors name the flag.
func (k Settings) Validate() error {
	switch {
	case k.DisaggPrefillTimeout <= 0:
		return errors.New("--disagg-prefill-timeout must be more than 0")
	case k.DrainMigrateAfter < 0:
		return errors.New("--drain-migrate-after cannot be negative: 0 disables it")
	case k.MigrationLimit < 0 || k.MigrationLimit > maxMigrations:
		return fmt.Errorf("--migration-limit %d: give 0 to %d", k.MigrationLimit, maxMigrations)
	case k.DisaggHandoverTimeout <= 0:
		return errors.New("--disagg-handover-timeout must be more than 0")
	}
	return cmp.Or(k.PrefillSettings.Validate(), k.RetrySettings.Validate())
}
