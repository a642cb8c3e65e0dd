package httpapi

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
)

const (
	minToken = 16
	maxToken = 4096 // well below what a header may have
)

// Token is the secret that a client of the inputs API shows. It keeps a hash only, so that nothing can print the secret.
type Token struct{ sum [sha256.Size]byte }

// ReadToken reads a token from a file: 16 to 4096 printable ASCII characters without spaces, and nothing else but one line
// end behind them. The file must not be readable by everybody, nor writable by anybody but its owner; its group may read it,
// since that is how containers are given secrets. No error quotes what the file has.
func ReadToken(path string) (*Token, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if mode := fi.Mode().Perm(); runtime.GOOS != "windows" && mode&0o026 != 0 {
		return nil, fmt.Errorf("%s has mode %04o: its token is everybody's to read, or others' to write", path, mode)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxToken+3))
	if err != nil {
		return nil, err
	}
	b = bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r"))
	if len(b) < minToken || len(b) > maxToken {
		return nil, fmt.Errorf("%s: a token has %d to %d characters", path, minToken, maxToken)
	}
	for _, c := range b {
		if c <= ' ' || c > '~' {
			return nil, fmt.Errorf("%s: a token is one line of printable ASCII without spaces", path)
		}
	}
	return &Token{sha256.Sum256(b)}, nil
}

// allows compares hashes, of equal length, in constant time: how long it takes tells nothing of the token.
func (t *Token) allows(h http.Header) bool {
	if t == nil {
		return true
	}
	given := h.Values("Authorization")
	if len(given) != 1 {
		return false
	}
	scheme, token, _ := strings.Cut(given[0], " ")
	sum := sha256.Sum256([]byte(strings.TrimLeft(token, " ")))
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(sum[:], t.sum[:]) == 1
}

// foreign says why a request may be a page's in some browser, and not its user's; "": it is not. Such a page reaches an
// address that is only its user's to reach: from another origin (the browser says so), or from the page's own, whose name
// resolves to the node's address by then. own is the host that was given to listen on.
func foreign(r *http.Request, own string) string {
	host := hostOf(r.Host)
	if _, err := netip.ParseAddr(host); err != nil && !strings.EqualFold(host, "localhost") && !strings.EqualFold(host, own) {
		return "Host is not localhost, an IP address, or the name that the node was told to listen on"
	}
	for i, origin := range r.Header.Values("Origin") {
		scheme, at, _ := strings.Cut(origin, "://")
		if i > 0 || scheme != "http" || !strings.EqualFold(strings.TrimSuffix(at, ":80"), strings.TrimSuffix(r.Host, ":80")) {
			return "Origin is another than the one that the request goes to"
		}
	}
	for _, site := range r.Header.Values("Sec-Fetch-Site") {
		if site != "same-origin" && site != "none" {
			return "Sec-Fetch-Site says that another site's page sent it"
		}
	}
	return ""
}

// hostOf is a Host without its port and without brackets.
func hostOf(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return strings.TrimSuffix(strings.TrimPrefix(hostport, "["), "]")
}
