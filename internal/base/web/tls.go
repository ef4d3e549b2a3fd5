package web

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
)

// TLSSettings are the files of both ports' TLS.
type TLSSettings struct {
	TLSCert     string `group:"Addresses" name:"tls-cert" placeholder:"FILE" help:"Server certificate of both ports (PEM, with the chain); requires --tls-key. Reloaded on SIGHUP, as are the next two. Default: plain HTTP."`
	TLSKey      string `group:"Addresses" name:"tls-key" placeholder:"FILE" help:"Private key of --tls-cert (PEM)."`
	TLSClientCA string `group:"Addresses" name:"tls-client-ca" placeholder:"FILE" help:"CA certificates for client certificates (PEM). Both ports then require a certificate from every client."`
}

// Validate refuses one file without the other.
func (s TLSSettings) Validate() error {
	if (s.TLSCert == "") != (s.TLSKey == "") {
		return errors.New("--tls-cert and --tls-key: give both or neither")
	}
	if s.TLSClientCA != "" && s.TLSCert == "" {
		return errors.New("--tls-client-ca: client certificates require TLS; give --tls-cert and --tls-key too")
	}
	return nil
}

// Certificates are the current server and CA certificates of both ports. Its methods
// are safe for concurrent use.
type Certificates struct {
	settings TLSSettings
	current  atomic.Pointer[tls.Config] // nil: nothing was read yet
}

// NewCertificates returns the certificates of the files, to be loaded by Read; nil if
// TLS is not configured.
func NewCertificates(s TLSSettings) *Certificates {
	if s.TLSCert == "" {
		return nil
	}
	return &Certificates{settings: s}
}

// Read reads the files; they apply to new connections when use is called. A nil
// receiver does nothing.
func (c *Certificates) Read() (use func(), err error) {
	if c == nil {
		return func() {}, nil
	}
	pair, err := tls.LoadX509KeyPair(c.settings.TLSCert, c.settings.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert %s, --tls-key %s: %w", c.settings.TLSCert, c.settings.TLSKey, err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	if name := c.settings.TLSClientCA; name != "" {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("--tls-client-ca: %w", err)
		}
		config.ClientCAs, config.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		if !config.ClientCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("--tls-client-ca %s: no PEM certificate found", name)
		}
	}
	return func() { c.current.Store(config) }, nil
}

// Config returns the TLS configuration of a port, nil for plain HTTP. Each new
// connection uses the current certificates.
func (c *Certificates) Config() *tls.Config {
	if c == nil {
		return nil
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			if config := c.current.Load(); config != nil {
				return config, nil
			}
			return nil, errors.New("no certificate has been loaded yet")
		},
	}
}
