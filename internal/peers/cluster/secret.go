package cluster

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"time"
)

// keySize is the least length of a shared key, bytes: whoever connects can try keys on the
// certificate that they get.
const keySize = 16

// member is the name in all certificates. Addresses are not in them: the key alone says who belongs
// to the cluster.
const member = "kvrouter"

// keyTLS returns the TLS settings of a member of a cluster with a shared key, for both ends of a
// connection. The key is the seed of a certificate authority that all members have. Each
// member draws a certificate of its own, and each end shows the other one of that authority before
// anything else is said. They are valid at all times, so clocks need not agree.
func keyTLS(cluster, key string) (*tls.Config, error) {
	seed, err := hkdf.Key(sha256.New, []byte(key), nil, "kvrouter cluster "+cluster, ed25519.SeedSize)
	if err != nil {
		return nil, fmt.Errorf("--cluster-key: %w", err)
	}
	authority := ed25519.NewKeyFromSeed(seed)
	always := x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: member}, NotBefore: time.Unix(0, 0),
		NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), BasicConstraintsValid: true,
	}
	root := always
	root.IsCA, root.KeyUsage = true, x509.KeyUsageCertSign
	issuer, err := certificate(&root, &root, authority.Public(), authority)
	if err != nil {
		return nil, err
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	own := always
	own.DNSNames, own.KeyUsage = []string{member}, x509.KeyUsageDigitalSignature
	own.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	shown, err := certificate(&own, issuer, public, authority)
	if err != nil {
		return nil, err
	}
	authorities := x509.NewCertPool()
	authorities.AddCert(issuer)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{shown.Raw}, PrivateKey: private, Leaf: shown}},
		RootCAs:      authorities, ServerName: member,
		ClientCAs: authorities, ClientAuth: tls.RequireAndVerifyClientCert,
		MinVersion: tls.VersionTLS13,
	}, nil
}

// certificate signs a certificate of a public key.
func certificate(template, issuer *x509.Certificate, public any, signer ed25519.PrivateKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, public, signer)
	if err != nil {
		return nil, fmt.Errorf("--cluster-key: %w", err)
	}
	return x509.ParseCertificate(der)
}
