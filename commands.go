package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"kvrouter/internal/base/manual"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/tools/batch"
	"kvrouter/internal/tools/doctor"
	"kvrouter/internal/tools/simulate"
	"kvrouter/internal/tools/top"
)

// cli is what kong parses: the commands, each with the flags that it reads.
type cli struct {
	Serve    Config          `cmd:"" default:"withargs" help:"Start workers, or attach those at the URLs, and serve (the default command)."`
	Doctor   DoctorCommand   `cmd:"" help:"Check this machine, the ports and the workers that serve would use with the same flags."`
	Top      TopCommand      `cmd:"" help:"Show the workers and latest requests of a running router in the terminal."`
	Batch    BatchCommand    `cmd:"" help:"Send a JSONL batch to an OpenAI endpoint; resumes an interrupted run."`
	Simulate SimulateCommand `cmd:"" help:"Replay a trace or generated conversations through the router and simulated workers, and compare policies."`
	Replay   ReplayCommand   `cmd:"" name:"replay-events" help:"Apply a file of --record-events or of Dynamo's recorder to an empty index, and print the result."`
	Version  VersionCommand  `cmd:"" help:"Print the version."`

	Completion manual.Completion `cmd:"" help:"Print a shell completion script: source <(kvrouter completion bash)."`
	Man        manual.Page       `cmd:"" help:"Print the man page: kvrouter man | man -l -."`

	ShowVersion kong.VersionFlag `name:"version" help:"Print the version."`
}

// command is a command with its settings.
type command interface{ Run() error }

// usual are the flags that most people need, by command and by task. A command without
// an entry has few flags: its help shows all of them.
var usual = map[string][]manual.Task{
	"serve": {
		{Title: "Start workers", Flags: []string{
			"model", "engine", "num-workers", "prefill-workers", "decode-workers", "gpus-per-worker", "block-size",
		}},
		{Title: "Attach workers", Flags: []string{"worker", "discovery"}},
		{Title: "Listen", Flags: []string{"host", "http-port", "router-host", "router-port", "api-key", "tls-cert", "tls-key"}},
		{Title: "Route", Flags: []string{"policy", "no-kv-events", "session-header", "router-queue-policy"}},
		{Title: "Run in production", Flags: []string{"config", "cluster", "index-snapshot", "log-level", "drain-timeout"}},
	},
	"doctor": {
		{Title: "Check", Flags: []string{"config", "engine", "model", "num-workers", "worker"}},
		{Title: "Report", Flags: []string{"json", "wait"}},
	},
	"simulate": {
		{Title: "Requests", Flags: []string{"trace", "synthetic", "concurrency", "speedup", "synthetic-rate", "agentic-rate", "rollouts-prompts", "tenants", "seed"}},
		{Title: "Workers", Flags: []string{"workers", "prefill-workers", "decode-workers", "block-size", "mock", "speedup-ratio", "faults"}},
		{Title: "Routing", Flags: []string{"policy", "no-kv-events", "router-queue-policy", "routers", "event-lag", "round-trip"}},
		{Title: "Cells", Flags: []string{"cells", "rtt-matrix"}},
		{Title: "Report", Flags: []string{"json"}},
	},
}

// newParser returns what reads arguments into c.
func newParser(c *cli, help *manual.Help, options ...kong.Option) (*kong.Kong, error) {
	help.Usual = usual
	parser, err := kong.New(c, append([]kong.Option{
		kong.Name("kvrouter"),
		kong.Description("KV-cache-aware router for vLLM and SGLang. It starts or attaches workers and serves one OpenAI endpoint. " +
			"Each request goes to the worker with the lowest cost: longest cached prefix weighed against load. " +
			"Arguments after -- are passed to every started worker."),
		settings.Environment("KVROUTER"),
		kong.Vars{"policies": strings.Join(policies.All(), ", "), "version": "kvrouter " + settings.Build()},
		kong.Help(help.Print),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("settings: %w", err)
	}
	return parser, nil
}

// parse reads the command line (without the program's name), the environment and the
// file of --config, sets the values that depend on the machine, and returns the command;
// nil: the help or the version has been printed. An error is one line with the fault,
// its place, and the correct form.
func parse(args []string, machine settings.Machine) (command, error) {
	var engineArgs []string
	passed := slices.Index(args, "--")
	if passed >= 0 {
		args, engineArgs = args[:passed], args[passed+1:]
	}

	if len(args) > 0 && args[0] == "help" {
		args = append(slices.Clone(args[1:]), "--help")
	}
	var c cli
	var help manual.Help
	var file settings.File
	printed := false
	read := func(ctx *kong.Context) (err error) {
		file, err = readFile(ctx)
		return err
	}
	parser, err := newParser(&c, &help, kong.Exit(func(int) { printed = true }), kong.WithBeforeResolve(read))
	if err != nil {
		return nil, err
	}
	if err := checkCommand(parser.Model, args); err != nil {
		return nil, err
	}
	ctx, err := parser.Parse(help.Take(args))
	if printed {
		return nil, nil
	}
	if err != nil {
		return nil, file.Explain(plain(err))
	}

	validate := func(config *Config) error {
		config.chooseEngine()
		if config.EngineArgs = engineArgs; passed < 0 {
			config.EngineArgs = file.EngineArgs(config.Engine)
		}
		return file.Explain(config.validate())
	}
	switch chosen := ctx.Selected().Target.Addr().Interface().(type) {
	case *Config:
		if err := validate(chosen); err != nil {
			return nil, err
		}
		return chosen, file.Explain(chosen.ResolveDefaults(machine))
	case *DoctorCommand:
		if err := validate(&chosen.Config); err != nil {
			return nil, err
		}
		chosen.Checks.Unusable = chosen.ResolveDefaults(machine)
		return chosen, nil
	case *SimulateCommand:
		return chosen, file.Explain(chosen.validate())
	case command:
		return chosen, nil
	}
	return nil, nil
}

// checkCommand refuses a first word that is neither a command nor a worker of the default command;
// kong would not name the commands.
func checkCommand(app *kong.Application, args []string) error {
	if len(args) == 0 || strings.HasPrefix(args[0], "-") || strings.ContainsAny(args[0], ":=") {
		return nil
	}
	var names []string
	for _, known := range app.Children {
		names = append(names, known.Name)
	}
	word, hint := args[0], ""
	if slices.Contains(names, word) {
		return nil
	}
	if nearest := settings.Nearest(word, names); nearest != "" {
		hint = fmt.Sprintf(" did you mean %q?", nearest)
	} else if strings.Contains(word, "/") {
		hint = fmt.Sprintf(" give a model by --model %s.", word)
	}
	return fmt.Errorf("unknown command %q:%s the commands are %s; give workers by URL, such as http://host:8000", word, hint, strings.Join(names, ", "))
}

// plain returns an error of kong without the name of the command or argument before it, and says
// where flags of the engine go, and workers.
func plain(err error) error {
	var parsing *kong.ParseError
	if !errors.As(err, &parsing) || parsing.Context == nil {
		return err
	}
	text, selected := err.Error(), parsing.Context.Selected()
	if selected != nil {
		text = strings.TrimPrefix(text, selected.Path()+": ")
		for _, argument := range selected.Positional {
			if plain, of := strings.CutPrefix(text, argument.Summary()+": "); of {
				text = plain
				if strings.Contains(text, "neither a URL") {
					text += "; give a model by --model"
				}
			}
		}
	}
	if strings.HasPrefix(text, "unexpected argument ") && strings.Contains(text, "://") {
		text += ": give all URLs one after another"
	}
	if strings.HasPrefix(text, "unknown flag --") && (selected == nil || selected.Name == "serve") {
		text += " (flags of the engine go after --)"
	}
	return errors.New(text)
}

// readFile reads the file that --config of the chosen command names. Its keys are the
// flags of that command and those of serve, so that all commands can share serve's file.
func readFile(ctx *kong.Context) (file settings.File, err error) {
	chosen := ctx.Selected()
	if chosen == nil {
		return file, nil
	}
	for _, flag := range chosen.Flags {
		if flag.Name != "config" {
			continue
		}
		name, _ := ctx.FlagValue(flag).(string)
		file, err = settings.ReadConfigFile(name, append(slices.Clone(chosen.Flags), ctx.Model.DefaultCmd.Flags...))
		ctx.AddResolver(kong.ResolverFunc(file.Resolve))
	}
	return file, err
}

// serviceVariable matches variables that Kubernetes sets for a Service named kvrouter.
var serviceVariable = regexp.MustCompile(`^KVROUTER_(PORT|SERVICE)($|_)|_(PORT|SERVICE)_`)

// misspelt returns the variables of an environment that look like one of a flag of serve and are
// none, each with that one.
func misspelt(environ []string) (variables map[string]string, err error) {
	parser, err := newParser(new(cli), new(manual.Help))
	if err != nil {
		return nil, err
	}
	var known, ofServe []string
	for _, command := range parser.Model.Children {
		for _, flag := range command.Flags {
			known = append(known, flag.Envs...)
			if command == parser.Model.DefaultCmd {
				ofServe = append(ofServe, flag.Envs...)
			}
		}
	}
	variables = map[string]string{}
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, "KVROUTER_") || slices.Contains(known, name) || serviceVariable.MatchString(name) {
			continue
		}
		if nearest := settings.NearestWithin(name, ofServe, 2); nearest != "" {
			variables[name] = nearest
		}
	}
	return variables, nil
}

// parseServe returns the settings of command serve.
func parseServe(args []string) (*Config, error) {
	chosen, err := parse(args, settings.ThisMachine())
	if err != nil {
		return nil, err
	}
	config, is := chosen.(*Config)
	if !is {
		return nil, errors.New("not the command serve")
	}
	return config, nil
}

// DoctorCommand is the command doctor: it has the flags of serve and its own.
type DoctorCommand struct {
	Config
	Checks doctor.Command `embed:""`
}

// Run prints what it finds.
func (c *DoctorCommand) Run() (err error) {
	if c.Checks.Misspelt, err = misspelt(os.Environ()); err != nil {
		return err
	}
	return c.Checks.Run(untilSignal(), c.setup(), os.Stdout)
}

// TopCommand is the command top.
type TopCommand struct {
	top.Command
	settings.FileFlag
}

// Run shows the router until the user quits.
func (c *TopCommand) Run() error { return c.Command.Run(untilSignal(), os.Stdout) }

// BatchCommand is the command batch.
type BatchCommand struct {
	batch.Command
	settings.FileFlag
}

// Run sends the requests.
func (c *BatchCommand) Run() error { return c.Command.Run(untilSignal(), os.Stdout, os.Stderr) }

// ReplayCommand is the command replay-events.
type ReplayCommand struct {
	events.ReplayCommand
	settings.FileFlag
}

// Run prints a summary of the file.
func (c *ReplayCommand) Run() error { return c.ReplayCommand.Run(os.Stdout) }

// VersionCommand is the command version.
type VersionCommand struct{}

// Run prints the version.
func (VersionCommand) Run() error {
	_, err := fmt.Println("kvrouter", settings.Build())
	return err
}

// SimulateCommand is the command simulate.
type SimulateCommand struct {
	simulate.Settings
	Scheduling
	Routing router.SchedulingSettings `embed:""`
	Pairs   proxy.PrefillSettings     `embed:""`
	Retry   health.RetrySettings      `embed:""`
	settings.FileFlag
}

// Run prints the figures of each policy.
func (c *SimulateCommand) Run() error {
	return c.Settings.Run(c.simulation(), strings.Split(c.Policy, ","), os.Stdout, os.Stderr)
}

// routing returns the settings of the router, with the defaults of those that are not
// simulated.
func (c *SimulateCommand) routing() (all router.Settings) {
	if err := kong.ApplyDefaults(&all); err != nil {
		panic(err) // the tags are wrong
	}
	all.SchedulingSettings = c.Routing
	return all
}

// simulation has what all runs have in common.
func (c *SimulateCommand) simulation() simulate.Simulation {
	return simulate.Simulation{
		Scoring: c.Scoring, Index: c.Index, Routing: c.routing(), Retry: c.Retry, Seed: c.Seed,
		Engine: c.Mock.SimConfig(c.BlockSize), Tiers: c.Mock.Tiers(), Peers: c.Mock.Peers(), Workers: c.workers(),
		Prefills: c.PrefillWorkers, Kind: c.Mock.DisaggKind(), Handover: c.Mock.Handover(), LeastUncached: c.Pairs.DisaggMinUncachedTokens,
	}
}

// workers is the number of workers of all roles.
func (c *SimulateCommand) workers() int {
	const usualWorkers = 8
	return cmp.Or(c.PrefillWorkers+c.DecodeWorkers, c.Workers, usualWorkers)
}

// validate checks what kong does not; its errors name the flag.
func (c *SimulateCommand) validate() error {
	if err := cmp.Or(c.Scheduling.validate(simulate.NewPolicy, strings.Split(c.Policy, ",")...), c.routing().Validate()); err != nil {
		return err
	}
	workers := c.workers()
	switch {
	case c.Workers != 0 && c.PrefillWorkers+c.DecodeWorkers != 0:
		return errors.New("give either --workers or --prefill-workers and --decode-workers")
	case (c.PrefillWorkers == 0) != (c.DecodeWorkers == 0) || c.PrefillWorkers < 0 || c.DecodeWorkers < 0:
		return fmt.Errorf("--prefill-workers %d and --decode-workers %d: give at least 1 of each, or neither", c.PrefillWorkers, c.DecodeWorkers)
	case workers < 1 || workers > 1000:
		return fmt.Errorf("%d workers: give 1 to 1000", workers)
	case c.Mock.SpeedupRatio == 0:
		return errors.New("--speedup-ratio 0: virtual time needs engine steps that take time; give more than 0")
	}
	return c.Mock.Validate(workers)
}
