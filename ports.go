package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
)

// portUse is one port that the router or a started worker listens on.
type portUse struct {
	flag   string
	base   int // value of the flag
	port   int
	host   string
	worker int // that listens, if port is not base
}

func (p portUse) String() string {
	if p.port == p.base {
		return fmt.Sprintf("%s %d", p.flag, p.base)
	}
	return fmt.Sprintf("%s %d (+%d for worker %d)", p.flag, p.base, p.port-p.base, p.worker)
}

// ports lists every port that will be listened on; 0 (any) is left out.
func (c *Config) ports() []portUse {
	const loopback = "127.0.0.1"
	var uses []portUse
	for _, p := range []portUse{{"--http-port", c.HTTPPort, c.HTTPPort, c.Host, 0}, {"--router-port", c.RouterPort, c.RouterPort, c.Host, 0}} {
		if p.port != 0 {
			uses = append(uses, p)
		}
	}
	if c.ReplicaSync && c.ReplicaSyncPort != 0 {
		uses = append(uses, portUse{"--replica-sync-port", c.ReplicaSyncPort, c.ReplicaSyncPort, c.Host, 0})
	}
	if c.Engine == EngineNone {
		return uses
	}
	for i := range c.NumWorkers {
		uses = append(uses, portUse{"--base-worker-port", c.BaseWorkerPort, c.BaseWorkerPort + i, loopback, i})
		for at := i * c.Ranks(); at < (i+1)*c.Ranks(); at++ {
			if c.KVEvents() {
				uses = append(uses,
					portUse{"--base-kv-events-port", c.BaseKVEventsPort, c.BaseKVEventsPort + at, loopback, i},
					portUse{"--base-kv-replay-port", c.BaseKVReplayPort, c.BaseKVReplayPort + at, loopback, i},
				)
			}
			uses = append(uses, portUse{"--base-metrics-port", c.BaseMetricsPort, c.BaseMetricsPort + at, loopback, i})
			if c.nixl() {
				uses = append(uses, portUse{"--base-nixl-port", c.BaseNIXLPort, c.BaseNIXLPort + at, loopback, i})
			}
		}
	}
	return uses
}

func (c *Config) checkPortNumbers() error {
	owner := map[int]portUse{}
	for _, p := range c.ports() {
		if p.base < 1 || p.port > 65535 {
			return fmt.Errorf("%s: ports go from 1 to 65535", p)
		}
		if other, taken := owner[p.port]; taken {
			return fmt.Errorf("%s and %s both mean port %d; move one of them", other, p, p.port)
		}
		owner[p.port] = p
	}
	return nil
}

// CheckPorts tells whether every port that will be listened on is free now. The
// error names the flag and the port.
func CheckPorts(cfg Config) error {
	for _, p := range cfg.ports() {
		listener, err := net.Listen("tcp", net.JoinHostPort(p.host, strconv.Itoa(p.port)))
		if err != nil {
			return fmt.Errorf("%s: port %d cannot be used (%w); end what holds it or give another %s", p, p.port, rootCause(err), p.flag)
		}
		if err := listener.Close(); err != nil {
			return fmt.Errorf("%s: port %d: %w", p, p.port, err)
		}
	}
	return nil
}

// rootCause drops the address that net repeats around a system error.
func rootCause(err error) error {
	var system *os.SyscallError
	if errors.As(err, &system) {
		return system.Err
	}
	return err
}
