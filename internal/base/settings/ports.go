package settings

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
)

// PortUse is one TCP port that the router or a started worker listens on.
type PortUse struct {
	Flag   string // that sets the port, or the first of a row
	Base   int    // the flag's value
	Port   int    // 1 to 65535
	Host   string // address that the port is opened on
	Worker int    // that listens, if Port is not Base
}

// String returns the flag, its value, and how the port follows from it.
func (p PortUse) String() string {
	if p.Port == p.Base {
		return fmt.Sprintf("%s %d", p.Flag, p.Base)
	}
	return fmt.Sprintf("%s %d (+%d for worker %d)", p.Flag, p.Base, p.Port-p.Base, p.Worker)
}

// CheckPortNumbers refuses invalid port numbers and ports that are used twice. The error
// names the flags.
func CheckPortNumbers(uses []PortUse) error {
	owner := map[int]PortUse{}
	for _, p := range uses {
		if p.Base < 1 || p.Port > 65535 {
			return fmt.Errorf("%s: ports range from 1 to 65535", p)
		}
		if other, taken := owner[p.Port]; taken {
			return fmt.Errorf("%s and %s both use port %d; change one of them", other, p, p.Port)
		}
		owner[p.Port] = p
	}
	return nil
}

// CheckPortsFree reports whether every port can be listened on now. The error names
// the flag and the port.
func CheckPortsFree(uses []PortUse) error {
	for _, p := range uses {
		listener, err := net.Listen("tcp", net.JoinHostPort(p.Host, strconv.Itoa(p.Port)))
		if err != nil {
			return fmt.Errorf("%s: port %d cannot be used (%w); stop the process that uses it, or give another %s", p, p.Port, rootCause(err),
				p.Flag)
		}
		if err := listener.Close(); err != nil {
			return fmt.Errorf("%s: port %d: %w", p, p.Port, err)
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
