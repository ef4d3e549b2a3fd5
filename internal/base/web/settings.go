package web

import "fmt"

// Settings are the flags for the exposure of the ports.
type Settings struct {
	RouterHost string      `group:"Addresses" default:"127.0.0.1" help:"Listen address of the router port. Anyone who can reach this port can add workers and read prompts."`
	Insecure   bool        `group:"Addresses" help:"Allow ports that other machines can reach (--host, --router-host, --ext-proc-host, --cluster-host) without a key."`
	TLS        TLSSettings `embed:""`
}

// Exposure is a port with its address and its authentication.
type Exposure struct {
	Flag, Host string // of its address
	Name       string // of the port
	Keyed      bool   // it requires a key
	Keys       string // the flags that set a key
}

// Validate refuses ports that other machines can reach without a key.
func (s Settings) Validate(ports ...Exposure) error {
	if err := s.TLS.Validate(); err != nil {
		return err
	}
	for _, p := range ports {
		if !s.Insecure && !p.Keyed && !Loopback(p.Host) {
			return fmt.Errorf("%s %s: every machine that can reach the %s could use it without a key; give %s, or --insecure to allow that", p.Flag,
				p.Host, p.Name, p.Keys)
		}
	}
	return nil
}
