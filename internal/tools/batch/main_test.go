package batch

import (
	"context"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"kvrouter/internal/testkit/leaks"
)

// childFile and childURL are the environment of a process of this test binary that only
// runs a batch, so that it can be killed.
const childFile, childURL = "KVROUTER_TEST_BATCH_FILE", "KVROUTER_TEST_BATCH_URL"

func TestMain(m *testing.M) {
	if file := os.Getenv(childFile); file != "" {
		if err := command(file, os.Getenv(childURL)).Run(context.Background(), io.Discard, io.Discard); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leaks.Main(m)
}

// command returns the command with its defaults, but for the concurrency.
func command(file, url string) Command {
	return Command{File: file, URL: url, Concurrency: 8, Attempts: 3, AnswerTimeout: time.Hour, GiveUpAfter: 10 * time.Minute, DrainTimeout: time.Second}
}
