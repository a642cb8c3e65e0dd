package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

func tokenFile(t testing.TB, text string, mode os.FileMode) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "token")
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
	return path
}

func token(t testing.TB, text string) *Token {
	t.Helper()
	token, err := ReadToken(tokenFile(t, text, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func TestReadToken(t *testing.T) {
	const good = "0123456789abcdef"
	for _, c := range []struct {
		text string
		mode os.FileMode
		want string // of the error; "": none
	}{
		{good, 0o600, ""}, {good + "\n", 0o400, ""}, {good + "\r\n", 0o640, ""}, {"~!" + good, 0o440, ""}, {strings.Repeat("x", 4096) + "\r\n", 0o600, ""},
		{good, 0o644, "mode 0644"}, {good, 0o604, "mode 0604"}, {good, 0o620, "mode 0620"}, {good, 0o602, "mode 0602"},
		{good[1:], 0o600, "16 to 4096"}, {good[1:] + "\n", 0o600, "16 to 4096"}, {"", 0o600, "16 to 4096"}, {strings.Repeat("x", 4097), 0o600, "16 to 4096"},
		{strings.Repeat("x", 1<<20), 0o600, "16 to 4096"}, {good + "\n\n", 0o600, "printable"}, {good + "\n" + good, 0o600, "printable"}, {good + " x", 0o600, "printable"}, {" " + good, 0o600, "printable"},
		{good + "ü", 0o600, "printable"}, {good + "\x00", 0o600, "printable"},
	} {
		_, err := ReadToken(tokenFile(t, c.text, c.mode))
		if (err == nil) != (c.want == "") || err != nil && (!strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), good[1:])) {
			t.Errorf("%.20q with mode %o: %v, want %q", c.text, c.mode, err, c.want)
		}
	}
	if _, err := ReadToken(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if _, err := ReadToken(t.TempDir()); err == nil {
		t.Error("a folder is read")
	}
	if s := fmt.Sprintf("%v %+v %#v", token(t, good), token(t, good), *token(t, good)); strings.Contains(s, good) {
		t.Errorf("a token prints: %s", s)
	}
}

// Without the token nothing is done, whatever else is right or wrong with a request; metrics and health need none.
func TestTokenIsDemanded(t *testing.T) {
	node := newNode(t)
	const secret = "0123456789abcdef"
	addr := take(t, Inputs{Node: node, Token: token(t, secret)}, nil)
	for _, c := range []struct {
		auth []string
		want int
	}{
		{[]string{"Bearer " + secret}, 202}, {[]string{"bearer  " + secret}, 202},
		{nil, 401}, {[]string{""}, 401}, {[]string{"Bearer"}, 401}, {[]string{"Bearer "}, 401}, {[]string{secret}, 401}, {[]string{"Basic " + secret}, 401},
		{[]string{"Bearer " + secret[1:]}, 401}, {[]string{"Bearer " + secret + "0"}, 401}, {[]string{"Bearer " + secret + " x"}, 401},
		{[]string{"Bearer " + strings.ToUpper(secret)}, 401}, {[]string{"Bearer " + secret, "Bearer " + secret}, 401},
	} {
		code, body, header := request{body: `1`, header: http.Header{"Authorization": c.auth}}.send(t, addr)
		if code != c.want || code == 401 && header.Get("WWW-Authenticate") != `Bearer realm="postrider"` {
			t.Errorf("%q: %d %v %s", c.auth, code, header, body)
		}
	}
	for _, r := range []request{{method: "GET", path: run1 + "/i"}, {method: "OPTIONS"}, {path: "/v1/nothing"}, {body: "x"}} {
		if code, body, _ := r.send(t, addr); code != 401 {
			t.Errorf("%+v: %d %s", r, code, body)
		}
	}
	if n := value(t, node.Store, "SELECT count(*) FROM inbox"); n != "2" {
		t.Errorf("%s inputs", n)
	}
	for _, path := range []string{"/metrics", "/livez", "/readyz"} {
		if code, _, _ := (request{method: "GET", path: path, header: head("Host", "prometheus.example")}).send(t, addr); code != 200 {
			t.Errorf("%s: %d", path, code)
		}
	}
}

// Whatever the command line let through: an address that others reach takes a token.
func TestOpenAddressTakesAToken(t *testing.T) {
	s, err := Listen("0.0.0.0:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := s.Run(ctx, prometheus.NewRegistry(), &Inputs{Node: newNode(t)}); err == nil || !strings.Contains(err.Error(), "a token is missing") {
		t.Fatalf("Run: %v", err)
	}
	cancel()
	if err := s.Run(ctx, prometheus.NewRegistry(), &Inputs{Node: newNode(t), Token: token(t, "0123456789abcdef")}); err != nil {
		t.Errorf("with a token: %v", err)
	}
}
