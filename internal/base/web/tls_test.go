package web

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// authority signs certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// newAuthority returns an authority that a fresh key makes.
func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	a.key = newKey(t)
	a.certificate = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	text, err := x509.CreateCertificate(rand.Reader, a.certificate, a.certificate, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.certificate, err = x509.ParseCertificate(text); err != nil {
		t.Fatal(err)
	}
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// issue writes a certificate for 127.0.0.1 and its key to two files.
func (a *authority) issue(t *testing.T, name, cert, key string) {
	t.Helper()
	own := newKey(t)
	text, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.certificate, &own.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, cert, "CERTIFICATE", text)
	writePEM(t, key, "PRIVATE KEY", der)
}

func writePEM(t *testing.T, name, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// client trusts the authority and shows the certificate of the files, if named.
func (a *authority) client(t *testing.T, cert, key string) *http.Client {
	t.Helper()
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AddCert(a.certificate)
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func TestCertificatesAreReadAgain(t *testing.T) {
	a, dir := newAuthority(t), t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	a.issue(t, "first", file("cert"), file("key"))
	settings := TLSSettings{TLSCert: file("cert"), TLSKey: file("key")}
	certificates := NewCertificates(settings)
	read := func() error {
		use, err := certificates.Read()
		if err == nil {
			use()
		}
		return err
	}
	if err := read(); err != nil {
		t.Fatal(err)
	}
	p, err := Listen("127.0.0.1", 0, "--http-port", 64, certificates.Config())
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Proto) })
	go func() { served <- p.Serve(handler) }()
	shown := func() string {
		t.Helper()
		c := a.client(t, "", "")
		defer c.CloseIdleConnections()
		response, err := c.Get(p.URL())
		if err != nil {
			return err.Error()
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		return response.TLS.PeerCertificates[0].Subject.CommonName + " " + string(text)
	}
	if got := shown(); got != "first HTTP/2.0" {
		t.Errorf("shown: %q", got)
	}
	a.issue(t, "second", file("cert"), file("key"))
	if got := shown(); got != "first HTTP/2.0" {
		t.Errorf("before it is read: %q", got)
	}
	if err := read(); err != nil {
		t.Error(err)
	}
	if got := shown(); got != "second HTTP/2.0" {
		t.Errorf("after it is read: %q", got)
	}
	if err := os.WriteFile(file("cert"), []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := read(); err == nil || !strings.Contains(err.Error(), "--tls-cert") {
		t.Errorf("a broken file: %v", err)
	}
	if got := shown(); got != "second HTTP/2.0" {
		t.Errorf("with a broken file: %q", got)
	}
	if !p.Drain(5 * time.Second) {
		t.Error("it did not drain")
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestClientsShowCertificates(t *testing.T) {
	a, other, dir := newAuthority(t), newAuthority(t), t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	a.issue(t, "server", file("cert"), file("key"))
	a.issue(t, "client", file("client"), file("client-key"))
	other.issue(t, "stranger", file("stranger"), file("stranger-key"))
	writePEM(t, file("ca"), "CERTIFICATE", a.certificate.Raw)
	certificates := NewCertificates(TLSSettings{TLSCert: file("cert"), TLSKey: file("key"), TLSClientCA: file("ca")})
	use, err := certificates.Read()
	if err != nil {
		t.Fatal(err)
	}
	use()
	p, err := Listen("127.0.0.1", 0, "--http-port", 64, certificates.Config())
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- p.Serve(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})) }()
	defer func() {
		p.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	for _, test := range []struct {
		who, cert string
		let       bool
	}{{"nobody", "", false}, {"a stranger", file("stranger"), false}, {"a client", file("client"), true}} {
		key := ""
		if test.cert != "" {
			key = test.cert + "-key"
		}
		c := a.client(t, test.cert, key)
		response, err := c.Get(p.URL())
		if err == nil {
			response.Body.Close()
		}
		if (err == nil) != test.let {
			t.Errorf("%s: %v", test.who, err)
		}
	}
}

func TestTLSSettingsGoTogether(t *testing.T) {
	for _, test := range []struct {
		settings TLSSettings
		ok       bool
	}{
		{TLSSettings{}, true},
		{TLSSettings{TLSCert: "c", TLSKey: "k"}, true},
		{TLSSettings{TLSCert: "c", TLSKey: "k", TLSClientCA: "a"}, true},
		{TLSSettings{TLSCert: "c"}, false},
		{TLSSettings{TLSKey: "k"}, false},
		{TLSSettings{TLSClientCA: "a"}, false},
	} {
		if err := test.settings.Validate(); (err == nil) != test.ok {
			t.Errorf("%+v: %v", test.settings, err)
		}
	}
	if use, err := NewCertificates(TLSSettings{}).Read(); err != nil || use == nil {
		t.Errorf("without files: %v", err)
	}
}
