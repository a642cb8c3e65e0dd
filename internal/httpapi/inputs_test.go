package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"postrider/executor"
	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

// inlet is a node's store, without an executor unless a test runs one.
type inlet struct{ *sqlite.Store }

func (i inlet) Submit(ctx context.Context, in executor.Input) (executor.Submitted, error) {
	return executor.Submit(ctx, i.Store, in)
}

func (i inlet) FindInput(ctx context.Context, tenant, run, id string) (executor.InputInfo, error) {
	return executor.FindInput(ctx, i.Store, tenant, run, id)
}

// newNode is an open node database that knows the agent "a".
func newNode(t testing.TB) inlet {
	t.Helper()
	schema, err := os.ReadFile("../../schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.db")
	s, err := sqlite.Open(t.Context(), path, sqlite.NodeSchema(string(schema), "n1", path), sqlite.Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	write(t, s, "INSERT INTO agent (name, kind, hosted, first_us, last_us) VALUES ('a', 'go', 1, 0, 0)")
	return inlet{s}
}

func write(t testing.TB, s *sqlite.Store, query string, args ...any) {
	t.Helper()
	if err := s.Write(t.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		_, _, err := tx.Exec(ctx, query, args...)
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func value(t testing.TB, s *sqlite.Store, query string, args ...any) (v string) {
	t.Helper()
	if err := s.Reader().QueryRowContext(t.Context(), query, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}

// fake is a node that does what a test says.
type fake func(ctx context.Context, in executor.Input) (executor.Submitted, error)

func (f fake) Submit(ctx context.Context, in executor.Input) (executor.Submitted, error) {
	return f(ctx, in)
}

func (f fake) FindInput(context.Context, string, string, string) (executor.InputInfo, error) {
	return executor.InputInfo{}, executor.ErrNotFound
}

// take runs a server of inputs until the test ends, and gives its address. change may alter it before it runs.
func take(t testing.TB, in Inputs, change func(*Server)) (addr string) {
	t.Helper()
	s, err := Listen("127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, prometheus.NewRegistry(), &in) }()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return s.Addr()
}

// request is one that is answered with 202, and what a case changes of it.
type request struct {
	method, path, body string
	header             http.Header // added; an empty value removes
}

const run1 = "/v1/tenants/default/agents/a/runs/run-1/inputs"

func (r request) send(t testing.TB, addr string) (code int, body string, header http.Header) {
	t.Helper()
	if r.method == "" {
		r.method = "POST"
	}
	if r.path == "" {
		r.path = run1
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, r.method, "http://"+addr+r.path, strings.NewReader(r.body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for name, values := range r.header {
		req.Header.Del(name)
		for _, v := range values {
			if strings.EqualFold(name, "Host") {
				req.Host = v
			} else {
				req.Header[http.CanonicalHeaderKey(name)] = append(req.Header[http.CanonicalHeaderKey(name)], v)
			}
		}
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header
}

func head(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h[pairs[i]] = append(h[pairs[i]], pairs[i+1])
	}
	return h
}

// TestEveryAnswer has each way to be refused, on a real store, with the field that is to blame. Nothing refused is stored.
func TestEveryAnswer(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	for _, r := range []request{
		{body: `1`, header: head("Idempotency-Key", "taken")},
		{path: "/v1/tenants/default/agents/a/runs/over/inputs", body: `1`},
		{path: "/v1/tenants/default/agents/a/runs/theirs/inputs", body: `1`},
	} {
		if code, body, _ := r.send(t, addr); code != 202 {
			t.Fatalf("%d %s", code, body)
		}
	}
	write(t, node.Store, "UPDATE run SET status = 'done' WHERE name = 'over'")
	write(t, node.Store, "UPDATE run SET agent = 'b' WHERE name = 'theirs'")
	before := value(t, node.Store, "SELECT count(*) FROM inbox")

	const tenants = "/v1/tenants/default/agents/a"
	for _, c := range []struct {
		name   string
		r      request
		code   int
		field  string
		detail string // part of it
	}{
		{"tenant", request{path: "/v1/tenants/a%20b/agents/a/runs/r/inputs", body: `1`}, 400, "tenant", "has a character other than"},
		{"no tenant", request{path: "/v1/tenants//agents/a/runs/r/inputs", body: `1`}, 400, "tenant", "is empty"},
		{"agent", request{path: "/v1/tenants/default/agents/a.b/runs/r/inputs", body: `1`}, 400, "agent", "has a character other than"},
		{"node", request{path: "/v1/tenants/default/agents/a@b.c/runs/r/inputs", body: `1`}, 400, "agent", "node"},
		{"no node", request{path: "/v1/tenants/default/agents/a@/runs/r/inputs", body: `1`}, 400, "agent", "node"},
		{"run", request{path: tenants + "/runs/~node/inputs", body: `1`}, 400, "run", "has a character other than"},
		{"long run", request{path: tenants + "/runs/" + strings.Repeat("r", 65) + "/inputs", body: `1`}, 400, "run", "longer than 64 bytes"},
		{"reserved id", request{body: `1`, header: head("Idempotency-Key", "pr:n/t/r/c")}, 400, "Idempotency-Key", "pr:"},
		{"long id", request{body: `1`, header: head("Idempotency-Key", strings.Repeat("i", 513))}, 400, "Idempotency-Key", "513 bytes"},
		{"id in Latin-1", request{body: `1`, header: head("Idempotency-Key", "caf\xe9")}, 400, "Idempotency-Key", "UTF-8"},
		{"control character in the id", request{body: `1`, header: head("Idempotency-Key", "a\u0085b")}, 400, "Idempotency-Key", "control character"},
		{"empty id", request{body: `1`, header: head("Idempotency-Key", "")}, 400, "Idempotency-Key", "is empty"},
		{"quoted empty id", request{body: `1`, header: head("Idempotency-Key", `""`)}, 400, "Idempotency-Key", "is empty"},
		{"open quote", request{body: `1`, header: head("Idempotency-Key", `"a`)}, 400, "Idempotency-Key", "does not end"},
		{"backslash at the end", request{body: `1`, header: head("Idempotency-Key", `"a\`)}, 400, "Idempotency-Key", "does not end"},
		{"wrong escape", request{body: `1`, header: head("Idempotency-Key", `"a\n"`)}, 400, "Idempotency-Key", "backslash"},
		{"parameters of the id", request{body: `1`, header: head("Idempotency-Key", `"a";b=1`)}, 400, "Idempotency-Key", "follows"},
		{"two ids", request{body: `1`, header: head("Idempotency-Key", "a", "Idempotency-Key", "b")}, 400, "Idempotency-Key", "more than once"},
		{"id without a run", request{path: tenants + "/inputs", body: `1`, header: head("Idempotency-Key", "a")}, 400, "Idempotency-Key", "within a run"},
		{"empty type", request{path: run1 + "?type=", body: `1`}, 400, "type", "0 bytes"},
		{"control character in the type", request{path: run1 + "?type=a%0Ab", body: `1`}, 400, "type", "control character"},
		{"two types", request{path: run1 + "?type=a&type=b", body: `1`}, 400, "type", "more than once"},
		{"no duration", request{path: run1 + "?in=soon", body: `1`}, 400, "in", "such as 5m"},
		{"empty duration", request{path: run1 + "?in=", body: `1`}, 400, "in", "such as 5m"},
		{"negative", request{path: run1 + "?in=-5m", body: `1`}, 400, "in", "negative"},
		{"no time", request{path: run1 + "?at=tomorrow", body: `1`}, 400, "at", "2026-01-31T12:00:00Z"},
		{"plus that is a space", request{path: run1 + "?at=2030-01-31T12:00:00+01:00", body: `1`}, 400, "at", "%2B"},
		{"number for a time", request{path: run1 + "?at=1796058084173", body: `1`}, 400, "at", "looks like the milliseconds from 1970 to 2026-"},
		{"early year", request{path: run1 + "?at=1969-01-31T12:00:00Z", body: `1`}, 400, "at", "1970 to 9999"},
		{"late year by its zone", request{path: run1 + "?at=9999-12-31T23:59:59-01:00", body: `1`}, 400, "at", "1970 to 9999"},
		{"in and at", request{path: run1 + "?in=5m&at=2030-01-31T12:00:00Z", body: `1`}, 400, "at", "exclude each other"},
		{"unknown parameter", request{path: run1 + "?typ=x", body: `1`}, 400, "typ", "no parameter"},
		{"unknown parameter with markup", request{path: run1 + "?%3Cscript%3E=x", body: `1`}, 400, "<script>", "no parameter"},
		{"semicolon", request{path: run1 + "?in=5m;type=x", body: `1`}, 400, "", "query is malformed"},
		{"broken escape in the query", request{path: run1 + "?type=%zz", body: `1`}, 400, "", "query is malformed"},
		{"no data", request{}, 400, "data", "is not JSON"},
		{"no JSON", request{body: "{\"a\": 1,}"}, 400, "data", "at byte"},
		{"two values", request{body: `1 2`}, 400, "data", "is not JSON"},
		{"byte order mark", request{body: "\ufeff1"}, 400, "data", "is not JSON"},
		{"no UTF-8", request{body: "\"\xff\""}, 400, "data", "is not UTF-8"},
		{"too deep", request{body: strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001)}, 400, "data", "is not JSON"},
		{"parameters of one input", request{method: "GET", path: run1 + "/taken?data=1"}, 400, "", "no parameters"},

		{"unknown agent", request{path: "/v1/tenants/default/agents/nobody/runs/r/inputs", body: `1`}, 404, "", "nobody"},
		{"unknown agent, new run", request{path: "/v1/tenants/default/agents/nobody/inputs", body: `1`}, 404, "", "nobody"},
		{"unknown input", request{method: "GET", path: run1 + "/i"}, 404, "", "not found"},
		{"unknown run", request{method: "GET", path: tenants + "/runs/unknown/inputs/taken"}, 404, "", "not found"},
		{"impossible run", request{method: "GET", path: tenants + "/runs/a%00b/inputs/taken"}, 404, "", "not found"},
		{"impossible id", request{method: "GET", path: run1 + "/%ff%00"}, 404, "", "not found"},
		{"other agent", request{method: "GET", path: "/v1/tenants/default/agents/b/runs/run-1/inputs/taken"}, 404, "", "not found"},
		{"no path", request{path: "/v1/tenants/default", body: `1`}, 404, "", "no such path"},
		{"no id", request{path: run1 + "/", body: `1`}, 404, "", "no such path"},
		{"no run", request{path: tenants + "/runs//inputs", body: `1`}, 404, "", "no such path"},
		{"longer path", request{path: run1 + "/i/data", body: `1`}, 404, "", "no such path"},
		{"slashes", request{path: "/v1//tenants/default/agents/a/inputs", body: `1`}, 404, "", "no such path"},
		{"dots", request{path: run1 + "/../inputs", body: `1`}, 404, "", "no such path"},

		{"method", request{method: "PUT", body: `1`}, 405, "", "POST"},
		{"options", request{method: "OPTIONS", header: head("Access-Control-Request-Method", "POST")}, 405, "", "POST"},
		{"inputs cannot be listed", request{method: "GET"}, 405, "", "POST"},
		{"one cannot be posted", request{path: run1 + "/taken", body: `1`}, 405, "", "GET"},

		{"id with other data", request{body: `2`, header: head("Idempotency-Key", "taken")}, 409, "", "other content"},
		{"id with another type", request{path: run1 + "?type=x", body: `1`, header: head("Idempotency-Key", "taken")}, 409, "", "other content"},
		{"done run", request{path: tenants + "/runs/over/inputs", body: `1`}, 409, "", "takes no input"},
		{"other agent's run", request{path: tenants + "/runs/theirs/inputs", body: `1`}, 409, "", "belongs to agent b"},

		{"too large", request{body: strings.Repeat(" ", maxBody) + "1"}, 413, "data", "8388608"},

		{"form", request{body: `1`, header: head("Content-Type", "application/x-www-form-urlencoded")}, 415, "Content-Type", ""},
		{"text, as a page may send", request{body: `1`, header: head("Content-Type", "text/plain")}, 415, "Content-Type", ""},
		{"none", request{body: `1`, header: http.Header{"Content-Type": nil}}, 415, "Content-Type", ""},
		{"two kinds", request{body: `1`, header: head("Content-Type", "application/json", "Content-Type", "application/json")}, 415, "Content-Type", ""},
		{"CloudEvents", request{body: `1`, header: head("Content-Type", "application/cloudevents+json")}, 415, "Content-Type", ""},
		{"charset", request{body: `1`, header: head("Content-Type", "application/json; charset=utf-16")}, 415, "Content-Type", ""},
		{"other parameter", request{body: `1`, header: head("Content-Type", "application/json; version=1")}, 415, "Content-Type", ""},
		{"compressed", request{body: `1`, header: head("Content-Encoding", "gzip")}, 415, "Content-Type", ""},

		{"foreign host", request{body: `1`, header: head("Host", "evil.example:8420")}, 403, "", "Host"},
		{"host that looks like an address", request{body: `1`, header: head("Host", "127.0.0.1.evil.example")}, 403, "", "Host"},
		{"foreign origin", request{body: `1`, header: head("Origin", "http://evil.example")}, 403, "", "Origin"},
		{"another port's origin", request{body: `1`, header: head("Origin", "http://127.0.0.1:1")}, 403, "", "Origin"},
		{"origin by another scheme", request{body: `1`, header: head("Origin", "https://"+addr)}, 403, "", "Origin"},
		{"origin that begins like this one", request{body: `1`, header: head("Origin", "http://"+addr+".evil.example")}, 403, "", "Origin"},
		{"opaque origin", request{body: `1`, header: head("Origin", "null")}, 403, "", "Origin"},
		{"two origins", request{body: `1`, header: head("Origin", "http://"+addr, "Origin", "http://"+addr)}, 403, "", "Origin"},
		{"another site", request{body: `1`, header: head("Sec-Fetch-Site", "cross-site")}, 403, "", "site"},
		{"same site, another origin", request{method: "GET", path: run1 + "/taken", header: head("Sec-Fetch-Site", "same-site")}, 403, "", "site"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, body, header := c.r.send(t, addr)
			var p problem
			if err := json.Unmarshal([]byte(body), &p); err != nil {
				t.Fatalf("%d %q: %v", code, body, err)
			}
			if code != c.code || p.Field != c.field || !strings.Contains(p.Detail, c.detail) {
				t.Errorf("%d %s, not %d about %q with %q", code, body, c.code, c.field, c.detail)
			}
			if p.Type != "about:blank" || p.Status != code || p.Title != http.StatusText(code) || strings.Contains(body, "<") {
				t.Errorf("%s", body)
			}
			for name, want := range map[string]string{"Content-Type": "application/problem+json", "X-Content-Type-Options": "nosniff",
				"Cache-Control": "no-store", "Access-Control-Allow-Origin": "", "Location": "", "Retry-After": ""} {
				if got := header.Get(name); got != want {
					t.Errorf("%s: %q, not %q", name, got, want)
				}
			}
			if allow := header.Get("Allow"); (code == 405) != (allow != "") {
				t.Errorf("Allow: %q", allow)
			}
		})
	}
	if after := value(t, node.Store, "SELECT count(*) FROM inbox"); after != before {
		t.Errorf("%s inputs are stored, and %s before", after, before)
	}
}

// TestAccepted has the forms of a request that is taken, and what is stored of it.
func TestAccepted(t *testing.T) {
	node := newNode(t)
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	addr := take(t, Inputs{Node: node}, func(s *Server) { s.host = "gateway.lan" })
	for _, c := range []struct {
		name string
		r    request
		want string // type, id, trace
	}{
		{"plain", request{header: head("Idempotency-Key", "1")}, "message 1 "},
		{"all", request{path: run1 + "?type=order%20placed&in=1h", header: head("Idempotency-Key", "2", "Traceparent", trace)}, "order placed 2 " + trace},
		{"quoted id", request{header: head("Idempotency-Key", `"a \"b\" \\ "`)}, `message a "b" \  `},
		{"charset", request{header: head("Content-Type", "Application/JSON;charset=UTF-8", "Idempotency-Key", "3")}, "message 3 "},
		{"invalid trace", request{header: head("Idempotency-Key", "4", "Traceparent", "00-0-0-0")}, "message 4 "},
		{"its own origin", request{header: head("Idempotency-Key", "5", "Origin", "http://"+addr, "Sec-Fetch-Site", "same-origin")}, "message 5 "},
		{"localhost", request{header: head("Idempotency-Key", "6", "Host", "LocalHost:1")}, "message 6 "},
		{"default port", request{header: head("Idempotency-Key", "7", "Host", "localhost:80", "Origin", "http://localhost")}, "message 7 "},
		{"IPv6", request{header: head("Idempotency-Key", "8", "Host", "[::1]:8420")}, "message 8 "},
		{"IPv6 without a port", request{header: head("Idempotency-Key", "9", "Host", "[::1]")}, "message 9 "},
		{"address of another interface", request{header: head("Idempotency-Key", "10", "Host", "192.0.2.1")}, "message 10 "},
		{"name to listen on", request{header: head("Idempotency-Key", "11", "Host", "Gateway.lan:80")}, "message 11 "},
		{"by hand", request{header: head("Idempotency-Key", "12", "Sec-Fetch-Site", "none")}, "message 12 "},
	} {
		c.r.body = `{"n":1}`
		code, body, header := c.r.send(t, addr)
		var out executor.Submitted
		if err := json.Unmarshal([]byte(body), &out); err != nil || code != 202 || out.Tenant != "default" || out.Run != "run-1" || out.Duplicate {
			t.Errorf("%s: %d %s", c.name, code, body)
			continue
		}
		got := value(t, node.Store, "SELECT type || ' ' || input_id || ' ' || COALESCE(trace, '') FROM inbox WHERE input_id = ? AND source = 'http'", out.ID)
		if got != c.want {
			t.Errorf("%s: stored %q, not %q", c.name, got, c.want)
		}
		if code, body, _ := (request{method: "GET", path: header.Get("Location")}).send(t, addr); code != 200 {
			t.Errorf("%s: Location %s: %d %s", c.name, header.Get("Location"), code, body)
		}
	}

	// Without a run and an id, both are made; with the time in a zone of its own, it is due then.
	code, body, header := request{path: "/v1/tenants/t-1/agents/a/inputs?at=2031-01-31T12:00:00.5%2B01:00", body: "1"}.send(t, addr)
	var out executor.Submitted
	if err := json.Unmarshal([]byte(body), &out); err != nil || code != 202 || out.Tenant != "t-1" || len(out.Run) != 26 || len(out.ID) != 26 {
		t.Fatalf("%d %s", code, body)
	}
	if want := "/v1/tenants/t-1/agents/a/runs/" + out.Run + "/inputs/" + out.ID; header.Get("Location") != want {
		t.Errorf("Location %s, not %s", header.Get("Location"), want)
	}
	if at, want := value(t, node.Store, "SELECT at_us FROM inbox WHERE run_name = ?", out.Run),
		fmt.Sprint(time.Date(2031, 1, 31, 11, 0, 0, 500_000_000, time.UTC).UnixMicro()); at != want {
		t.Errorf("due at %s, not %s", at, want)
	}
}

// An input for another node is addressed as an agent's commands are.
func TestInputForAnotherNode(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	code, body, header := request{path: "/v1/tenants/default/agents/b@n2/runs/r/inputs", body: `1`, header: head("Idempotency-Key", "i")}.send(t, addr)
	if code != 202 || header.Get("Location") != "/v1/tenants/default/agents/b@n2/runs/r/inputs/i" {
		t.Fatalf("%d %s %v", code, body, header)
	}
	if got := value(t, node.Store, "SELECT agent || '@' || node FROM inbox"); got != "b@n2" {
		t.Errorf("for %s", got)
	}
	for path, want := range map[string]int{header.Get("Location"): 200, "/v1/tenants/default/agents/b/runs/r/inputs/i": 200,
		"/v1/tenants/default/agents/b@n3/runs/r/inputs/i": 404} {
		if code, body, _ := (request{method: "GET", path: path}).send(t, addr); code != want {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}

// What JSON parsers tend to change is kept to the byte.
func TestBytesAreKept(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	for i, data := range []string{
		`9007199254740993`, `0.10`, `-0.0`, `1E400`, `"\ud800"`, `"\udc00\ud800"`, `{"a":1,"a":2}`, `{"":{}}`, " \r\n\t{ \"a\" : [ ] } \n",
		`"<&>\u003c\/"`, "\"\u2028\u007f\"", `"` + strings.Repeat("x", 300_000) + `"`, strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000),
	} {
		id := fmt.Sprint(i)
		if code, body, _ := (request{body: data, header: head("Idempotency-Key", id)}).send(t, addr); code != 202 {
			t.Errorf("%.40q: %d %s", data, code, body)
		} else if got := value(t, node.Store, "SELECT data FROM inbox WHERE input_id = ?", id); got != data {
			t.Errorf("%.40q became %.40q", data, got)
		}
	}
}

// The API and the executor draw the line at the same byte.
func TestLargestInput(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	largest := `"` + strings.Repeat("x", maxBody-2) + `"`
	for i, chunked := range []bool{false, true} {
		path := fmt.Sprintf("http://%s/v1/tenants/default/agents/a/runs/%d/inputs", addr, i)
		for _, c := range []struct {
			body string
			want int
		}{{largest, 202}, {largest + " ", 413}} {
			body := io.Reader(strings.NewReader(c.body))
			if chunked {
				body = io.MultiReader(body) // of a length that net/http cannot tell
			}
			resp, err := http.Post(path, "application/json", body)
			if err != nil {
				t.Fatal(err)
			}
			if resp.Body.Close(); resp.StatusCode != c.want {
				t.Errorf("chunked %t, %d bytes: %d", chunked, len(c.body), resp.StatusCode)
			}
		}
	}
	if got := value(t, node.Store, "SELECT group_concat(length(data)) FROM inbox"); got != fmt.Sprintf("%d,%d", maxBody, maxBody) {
		t.Errorf("stored %s bytes", got)
	}
	_, err := executor.Submit(t.Context(), node.Store, executor.Input{Tenant: "d", Agent: "a", Type: "t", Data: []byte(largest + " ")})
	if !errors.Is(err, executor.ErrInvalid) {
		t.Errorf("the executor takes more: %v", err)
	}
}

// Of many who send one input at once, one stores it, and the others learn that it is there.
func TestOneIDCountsOnce(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	const senders = 20
	answers := make(chan string, senders)
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for i := range senders {
		wg.Go(func() {
			<-begin
			key := "order 17"
			if i%2 == 0 {
				key = `"order 17"` // the same
			}
			code, body, header := request{body: `{"n":1}`, header: head("Idempotency-Key", key)}.send(t, addr)
			answers <- fmt.Sprint(code, " ", header.Get("Location"), " ", body)
		})
	}
	close(begin)
	wg.Wait()
	close(answers)
	count := map[string]int{}
	for a := range answers {
		count[a]++
	}
	answer := "202 " + run1 + "/order%2017 "
	first := answer + `{"tenant":"default","run":"run-1","id":"order 17","duplicate":false}` + "\n"
	again := answer + `{"tenant":"default","run":"run-1","id":"order 17","duplicate":true}` + "\n"
	if count[first] != 1 || count[again] != senders-1 {
		t.Errorf("%v", count)
	}
	if n := value(t, node.Store, "SELECT count(*) FROM inbox"); n != "1" {
		t.Errorf("%s inputs", n)
	}
}

// Every id that may be stored can be asked for, by its Location or by any escaping of it.
func TestAnyIDHasAPath(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	for _, id := range []string{"a/b", "a%2Fb", "%", "a%", "../x", "..", ".", "//", "a?b#c", `"q"`, ` a `, "ü 日本 😀", "a+b&c=d;e", "<script>", "inputs"} {
		key := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(id) + `"`
		code, body, header := request{body: `1`, header: head("Idempotency-Key", key)}.send(t, addr)
		if at := header.Get("Location"); code != 202 || strings.HasSuffix(at, "/.") || strings.HasSuffix(at, "/..") { // clients resolve dots
			t.Errorf("%q: %d at %s: %s", id, code, at, body)
			continue
		}
		every := ""
		for i := range len(id) {
			every += fmt.Sprintf("%%%02x", id[i])
		}
		for _, path := range []string{header.Get("Location"), run1 + "/" + every} {
			code, body, _ := request{method: "GET", path: path}.send(t, addr)
			var got seenInput
			if err := json.Unmarshal([]byte(body), &got); err != nil || code != 200 || got.ID != id {
				t.Errorf("%q by %s: %d %s", id, path, code, body)
			}
		}
	}
}

// What an agent wrote on its stderr, or its state, may be in the reason of a failure. Who reaches the address without a token
// is not told.
func TestReasonsAreForWhoHasAToken(t *testing.T) {
	node := newNode(t)
	var token Token
	token.sum = sha256.Sum256([]byte("0123456789abcdef"))
	for _, c := range []struct {
		in     Inputs
		header http.Header
		told   bool
	}{{Inputs{Node: node}, nil, false}, {Inputs{Node: node, Token: &token}, head("Authorization", "Bearer 0123456789abcdef"), true}} {
		addr := take(t, c.in, nil)
		code, body, header := request{body: `1`, header: c.header}.send(t, addr)
		if code != 202 {
			t.Fatalf("%d %s", code, body)
		}
		look := func() string {
			t.Helper()
			code, body, _ := request{method: "GET", path: header.Get("Location"), header: c.header}.send(t, addr)
			if code != 200 {
				t.Fatalf("%d %s", code, body)
			}
			return body
		}
		if body := look(); strings.Contains(body, `"reason":"",`) != c.told || strings.Contains(body, `"last_error":"",`) != c.told {
			t.Errorf("told %t: %s", c.told, body)
		}
		write(t, node.Store, "UPDATE inbox SET ended_us = 1, outcome = 'dead', reason = 'agent a: password in clear', last_error = 'stderr: key' WHERE outcome IS NULL")
		body = look()
		if !strings.Contains(body, `"state":"dead"`) || strings.Contains(body, "password") != c.told || strings.Contains(body, "stderr") != c.told ||
			strings.Contains(body, "reason") != c.told || strings.Contains(body, "last_error") != c.told {
			t.Errorf("told %t: %s", c.told, body)
		}
	}
}

// An input tells where it stands, from its arrival to the step that consumed it, and not what it says.
func TestInputTellsWhereItStands(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	look := func(path string) (got seenInput, raw string) {
		t.Helper()
		code, body, header := request{method: "GET", path: path}.send(t, addr)
		if err := json.Unmarshal([]byte(body), &got); err != nil || code != 200 || header.Get("Content-Type") != "application/json" {
			t.Fatalf("%s: %d %s", path, code, body)
		}
		return got, body
	}
	_, _, header := request{body: `"secret"`, header: head("Idempotency-Key", "i")}.send(t, addr)
	got, raw := look(header.Get("Location"))
	if got.State != "pending" || got.Source != "http" || got.Type != "message" || got.Attempts != 0 || got.Step != 0 || strings.Contains(raw, "secret") {
		t.Errorf("%s", raw)
	}
	if got.ArrivedAt == nil || got.NextTryAt != nil || !strings.Contains(raw, `"next_try_at":null`) {
		t.Errorf("%s", raw)
	} else if _, err := time.Parse("2006-01-02T15:04:05.000000Z", *got.ArrivedAt); err != nil {
		t.Error(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan struct{}, 1)
	e := executor.New(node.Store, "n1", map[string]agent.Agent{"a": agent.Func(func(context.Context, agent.Step) (agent.Effects, error) {
		select {
		case asked <- struct{}{}:
			return agent.Effects{}, errors.New("not yet")
		default:
			return agent.Effects{}, nil
		}
	})}, executor.Options{BackoffMin: time.Millisecond, BackoffMax: time.Millisecond, Poll: 5 * time.Millisecond})
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(20 * time.Second); got.State != "consumed"; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("it stays %s", raw)
		}
		got, raw = look(header.Get("Location"))
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got.Step != 1 || len(got.Branch) != 26 {
		t.Errorf("%s", raw)
	}
	if code, body, _ := (request{method: "HEAD", path: header.Get("Location")}).send(t, addr); code != 200 || body != "" {
		t.Errorf("HEAD: %d %q", code, body)
	}
}

func TestTraceparent(t *testing.T) {
	const trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	for given, want := range map[string]string{
		"00-" + trace + "-" + parent + "-01":                   "00-" + trace + "-" + parent + "-01",
		"00-" + trace + "-" + parent + "-ff":                   "00-" + trace + "-" + parent + "-ff",
		"cc-" + trace + "-" + parent + "-01":                   "00-" + trace + "-" + parent + "-01",
		"cc-" + trace + "-" + parent + "-01-more":              "00-" + trace + "-" + parent + "-01",
		"cc-" + trace + "-" + parent + "-01.more":              "",
		"00-" + trace + "-" + parent + "-01-more":              "",
		"ff-" + trace + "-" + parent + "-01":                   "",
		"00-" + trace + "-" + parent + "-0":                    "",
		"00-" + trace + "-" + parent + "_01":                   "",
		"00_" + trace + "-" + parent + "-01":                   "",
		"00-" + trace + "_" + parent + "-01":                   "",
		"00-" + strings.ToUpper(trace) + "-" + parent + "-01":  "",
		"00-" + strings.Repeat("0", 32) + "-" + parent + "-01": "",
		"00-" + trace + "-" + strings.Repeat("0", 16) + "-01":  "",
		"0g-" + trace + "-" + parent + "-01":                   "",
		"00-" + trace + "-" + parent + "-0\u00e9":              "",
		"": "",
	} {
		if got := traceparent(http.Header{"Traceparent": {given}}); got != want {
			t.Errorf("%q: %q, not %q", given, got, want)
		}
	}
	one := "00-" + trace + "-" + parent + "-01"
	if got := traceparent(http.Header{"Traceparent": {one, one}}); got != "" {
		t.Errorf("two: %q", got)
	}
}

// What the node is at fault for can be tried again, with the same key.
func TestTryLater(t *testing.T) {
	for _, c := range []struct {
		err    error
		code   int
		retry  string
		reason string // in the log
	}{
		{fmt.Errorf("write: %w: x", sqlite.ErrFull), 503, "60", "full"}, {sqlite.ErrBusy, 503, "1", "busy"}, {sqlite.ErrClosed, 503, "5", "other"},
		{fmt.Errorf("%w: x", sqlite.ErrUnknown), 503, "5", "other"}, {ErrNotReady, 503, "1", "starting"}, {context.DeadlineExceeded, 503, "5", "busy"},
		{errors.New("panic in a write: <b>\nstack"), 500, "", "other"},
	} {
		var log lockedBuffer
		addr := take(t, Inputs{Node: fake(func(context.Context, executor.Input) (executor.Submitted, error) { return executor.Submitted{}, c.err })}, func(s *Server) {
			s.log = slog.New(slog.NewTextHandler(&log, nil))
		})
		code, body, header := request{body: `1`}.send(t, addr)
		if code != c.code || header.Get("Retry-After") != c.retry || strings.Contains(body, "stack") || strings.Contains(body, "<b>") {
			t.Errorf("%v: %d, Retry-After %q, %s", c.err, code, header.Get("Retry-After"), body)
		}
		if want := fmt.Sprintf("code=%d reason=%s\n", c.code, c.reason); !strings.HasSuffix(log.String(), want) {
			t.Errorf("%v: logged %q, want %s", c.err, log.String(), want)
		}
	}
}

// A disk without room refuses, and keeps nothing of what it refused: the same input is taken once there is room.
func TestFullDisk(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	r := request{body: `"` + strings.Repeat("x", 1<<20) + `"`, header: head("Idempotency-Key", "i")}
	write(t, node.Store, "PRAGMA max_page_count = 1") // SQLite makes it what there is
	if code, body, header := r.send(t, addr); code != 503 || header.Get("Retry-After") != "60" || !strings.Contains(body, "disk is full") {
		t.Errorf("%d %v %s", code, header, body)
	}
	if n := value(t, node.Store, "SELECT count(*) FROM inbox"); n != "0" {
		t.Errorf("%s inputs", n)
	}
	write(t, node.Store, "PRAGMA max_page_count = 1000000")
	if code, body, _ := r.send(t, addr); code != 202 || !strings.Contains(body, `"duplicate":false`) {
		t.Errorf("with room: %d %s", code, body)
	}
}

// A flood is sent away before it costs memory, and what is in hand goes on.
func TestFlood(t *testing.T) {
	inHand, release := make(chan struct{}), make(chan struct{})
	addr := take(t, Inputs{Node: fake(func(ctx context.Context, in executor.Input) (executor.Submitted, error) {
		inHand <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return executor.Submitted{ID: "i", Run: "r"}, nil
	})}, func(s *Server) { s.limits.requests, s.limits.bytes = 3, 100 })
	codes := make(chan int, 3)
	post := func(size int) {
		code, _, _ := request{body: fmt.Sprintf("%*d", size, 1)}.send(t, addr)
		codes <- code
	}
	taken := func() {
		t.Helper()
		select {
		case <-inHand:
		case code := <-codes:
			t.Fatalf("answered %d", code)
		case <-time.After(20 * time.Second):
			t.Fatal("not in time")
		}
	}
	refused := func(size int, detail string) {
		t.Helper()
		code, body, header := request{body: fmt.Sprintf("%*d", size, 1)}.send(t, addr)
		if code != 503 || header.Get("Retry-After") != "1" || !strings.Contains(body, detail) {
			t.Errorf("%d %v %s", code, header, body)
		}
	}
	go post(60)
	taken()
	refused(41, "more than 100 bytes")
	for range 2 {
		go post(20)
		taken()
	}
	for range 4 {
		refused(1, "more than 3 requests")
	}
	if resp, err := http.Get("http://" + addr + "/livez"); err != nil || resp.StatusCode != 200 {
		t.Errorf("livez: %v", err)
	} else {
		resp.Body.Close()
	}
	close(release)
	for range 3 {
		if code := <-codes; code != 202 {
			t.Errorf("in hand: %d", code)
		}
	}
	go post(100) // all of it was given back
	taken()
	if code := <-codes; code != 202 {
		t.Errorf("after: %d", code)
	}
}

// raw sends bytes on a connection of its own, and gives the connection.
func raw(t *testing.T, addr, text string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	return c
}

// answers reads the status lines of all answers until the server closes.
func answers(t *testing.T, c net.Conn) (list []string) {
	t.Helper()
	b := bufio.NewReader(c)
	for {
		resp, err := http.ReadResponse(b, nil)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) && resp == nil {
			return list
		}
		if err != nil {
			t.Fatalf("after %v: %v", list, err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, resp.Status[:3])
		if own := resp.StatusCode == 403 || resp.StatusCode == 408 || resp.StatusCode == 413; own && !bytes.Contains(body, []byte(`"status":`+resp.Status[:3])) {
			t.Errorf("%s %s", resp.Status, body)
		}
	}
}

// TestRawRequests has what no client library sends.
func TestRawRequests(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, nil)
	const start = "POST " + run1 + " HTTP/1.1\r\n"
	const tail = "Content-Type: application/json\r\nConnection: close\r\n"
	for _, c := range []struct{ name, text, want string }{
		{"as it should be", start + "Host: localhost\r\n" + tail + "Content-Length: 1\r\n\r\n1", "202"},
		{"no host", start + tail + "Content-Length: 1\r\n\r\n1", "400"},
		{"empty host", start + "Host:\r\n" + tail + "Content-Length: 1\r\n\r\n1", "403"},
		{"HTTP/1.0 without a host", "POST " + run1 + " HTTP/1.0\r\n" + tail + "Content-Length: 1\r\n\r\n1", "403"},
		{"two hosts", start + "Host: localhost\r\nHost: evil.example\r\n" + tail + "Content-Length: 1\r\n\r\n1", "400"},
		{"host in the target", "POST http://evil.example" + run1 + " HTTP/1.1\r\nHost: localhost\r\n" + tail + "Content-Length: 1\r\n\r\n1", "403"},
		{"number for an address", start + "Host: 2130706433\r\n" + tail + "Content-Length: 1\r\n\r\n1", "403"},
		{"user in the host", start + "Host: localhost@evil.example\r\n" + tail + "Content-Length: 1\r\n\r\n1", "400"},
		{"dot behind the host", start + "Host: localhost.\r\n" + tail + "Content-Length: 1\r\n\r\n1", "403"},
		{"chunked", start + "Host: localhost\r\n" + tail + "Transfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n2\r\n,2\r\n1\r\n]\r\n0\r\n\r\n", "202"},
		{"chunked, and a length", start + "Host: localhost\r\n" + tail + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n", "202"},
		{"broken chunk", start + "Host: localhost\r\n" + tail + "Transfer-Encoding: chunked\r\n\r\nx\r\n", "400"},
		{"two lengths", start + "Host: localhost\r\n" + tail + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n12", "400"},
		{"negative length", start + "Host: localhost\r\n" + tail + "Content-Length: -1\r\n\r\n", "400"},
		{"no body", start + "Host: localhost\r\n" + tail + "\r\n", "400"},
		{"length beyond the limit", start + "Host: localhost\r\n" + tail + "Content-Length: 8388609\r\n\r\n", "413"},
		{"length beyond everything", start + "Host: localhost\r\n" + tail + "Content-Length: 9223372036854775807\r\n\r\n", "413"},
		{"unknown expectation", start + "Host: localhost\r\n" + tail + "Expect: money\r\nContent-Length: 1\r\n\r\n1", "417"},
		{"large header", start + "Host: localhost\r\nX: " + strings.Repeat("x", 30<<10) + "\r\n" + tail + "Content-Length: 1\r\n\r\n1", "431"},
		{"two in one go", "POST " + run1 + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n1" +
			start + "Host: localhost\r\n" + tail + "Content-Length: 1\r\n\r\n2", "202 202"},
		{"refused, then another", "POST " + run1 + "?x=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n1" +
			start + "Host: localhost\r\n" + tail + "Content-Length: 1\r\n\r\n2", "400 202"},
		{"control character in the id", start + "Host: localhost\r\nIdempotency-Key: a\x01b\r\n" + tail + "Content-Length: 1\r\n\r\n1", "400"},
		{"broken escape in the path", "POST " + run1 + "/%zz HTTP/1.1\r\nHost: localhost\r\n" + tail + "Content-Length: 1\r\n\r\n1", "400"},
		{"asterisk", "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n" + tail + "\r\n", "200"},
	} {
		if got := strings.Join(answers(t, raw(t, addr, c.text)), " "); got != c.want {
			t.Errorf("%s: %s, not %s", c.name, got, c.want)
		}
	}
}

// Who asks before sending is told to go on only once the rest of the request is right.
func TestExpectContinue(t *testing.T) {
	addr := take(t, Inputs{Node: newNode(t)}, nil)
	ask := func(header string) (c net.Conn, line string) {
		c = raw(t, addr, "POST "+run1+" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nConnection: close\r\n"+header+"\r\n\r\n")
		line, err := bufio.NewReaderSize(c, 16).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return c, line
	}
	if _, line := ask("Content-Length: 8388609"); !strings.Contains(line, "413") {
		t.Errorf("too large: %s", line)
	}
	if _, line := ask("Content-Length: 1\r\nOrigin: http://evil.example"); !strings.Contains(line, "403") {
		t.Errorf("foreign: %s", line)
	}
	c, line := ask("Content-Length: 1")
	if !strings.Contains(line, "100") {
		t.Fatalf("%s", line)
	}
	if _, err := io.WriteString(c, "1"); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(c); err != nil || !bytes.Contains(rest, []byte("HTTP/1.1 202 ")) {
		t.Errorf("%v %s", err, rest)
	}
}

// A body may take longer than a request without one. A client that stops in the middle is cut, and one that never does
// too, in the end; neither has stored anything.
func TestSlowBody(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, func(s *Server) {
		s.limits.header, s.limits.answer = 100*time.Millisecond, 100*time.Millisecond
		s.limits.silence, s.limits.body = 300*time.Millisecond, 2*time.Second
	})
	begin := func(length int) net.Conn {
		return raw(t, addr, fmt.Sprintf("POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", run1, length))
	}
	drip := func(c net.Conn, n int) {
		tick := time.NewTicker(25 * time.Millisecond)
		defer tick.Stop()
		for range n {
			<-tick.C
			if _, err := io.WriteString(c, "1"); err != nil {
				return
			}
		}
	}
	slow := begin(20)
	drip(slow, 20)
	if got := answers(t, slow); !slices.Equal(got, []string{"202"}) {
		t.Errorf("a slow one: %v", got)
	}
	silent := begin(20)
	drip(silent, 2)
	if got := answers(t, silent); !slices.Equal(got, []string{"408"}) {
		t.Errorf("a silent one: %v", got)
	}
	endless := begin(1 << 20)
	dripped := make(chan struct{})
	go func() { defer close(dripped); drip(endless, 1<<20) }()
	if resp, err := http.ReadResponse(bufio.NewReader(endless), nil); err != nil || resp.StatusCode != 408 {
		t.Errorf("an endless one: %v", err)
	} else {
		resp.Body.Close()
	}
	endless.Close()
	<-dripped
	gone := begin(20)
	drip(gone, 2)
	gone.Close()
	if n := value(t, node.Store, "SELECT count(*) FROM inbox"); n != "1" {
		t.Errorf("%s inputs", n)
	}
}

// The deadline of a body must not end the request while its input is being stored.
func TestSlowCommit(t *testing.T) {
	addr := take(t, Inputs{Node: fake(func(ctx context.Context, in executor.Input) (executor.Submitted, error) {
		select {
		case <-ctx.Done():
			return executor.Submitted{}, context.Cause(ctx)
		case <-time.After(300 * time.Millisecond):
			return executor.Submitted{Run: "r", ID: "i"}, nil
		}
	})}, func(s *Server) { s.limits.header, s.limits.silence = 50*time.Millisecond, 50*time.Millisecond })
	for _, body := range []io.Reader{strings.NewReader("1"), io.MultiReader(strings.NewReader("1"))} { // with a length, and chunked
		resp, err := http.Post("http://"+addr+run1, "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		if resp.Body.Close(); resp.StatusCode != 202 {
			t.Errorf("%s", resp.Status)
		}
	}
}

// A commit that hangs is not waited for without end, and what was refused meanwhile is not stored later.
func TestStoreThatHangs(t *testing.T) {
	node := newNode(t)
	addr := take(t, Inputs{Node: node}, func(s *Server) { s.limits.store = 100 * time.Millisecond })
	hang, release := context.WithCancel(context.Background())
	t.Cleanup(release)
	inHand, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- node.Write(context.Background(), func(context.Context, *sqlite.Tx) error { close(inHand); <-hang.Done(); return nil })
	}()
	<-inHand
	if code, body, header := (request{body: `1`}).send(t, addr); code != 503 || header.Get("Retry-After") == "" {
		t.Errorf("%d %s", code, body)
	}
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	write(t, node.Store, "UPDATE meta SET rewinds = rewinds") // behind it
	if n := value(t, node.Store, "SELECT count(*) FROM inbox"); n != "0" {
		t.Errorf("%s inputs", n)
	}
}

// Relays and folds have no inputs.
func TestNoInputsWithoutANode(t *testing.T) {
	if code, _, _ := get(t, "POST", start(t, prometheus.NewRegistry())+run1); code != 404 {
		t.Errorf("%d", code)
	}
}

// Logs have neither tokens nor payloads nor, as they usually are, ids.
func TestLogsTellNothing(t *testing.T) {
	for _, level := range []slog.Level{slog.LevelInfo, slog.LevelDebug} {
		var log lockedBuffer
		node := newNode(t)
		addr := take(t, Inputs{Node: node, Token: token(t, "secret-secret-secret")}, func(s *Server) {
			s.log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level}))
		})
		for _, auth := range []string{"Bearer secret-secret-secret", "Bearer wrong-wrong-wrong-secret"} {
			for _, body := range []string{`"payload"`, `"payload`, `"payload 2"`} {
				request{body: body, header: head("Idempotency-Key", "order-17", "Authorization", auth)}.send(t, addr)
				request{method: "GET", path: run1 + "/order-17-unknown", header: head("Authorization", auth)}.send(t, addr)
			}
		}
		text := log.String()
		if strings.Contains(text, "secret") || strings.Contains(text, "payload") || level == slog.LevelInfo && strings.Contains(text, "order-17") {
			t.Errorf("%s", text)
		}
		if level == slog.LevelDebug && !strings.Contains(text, "code=409") {
			t.Errorf("nothing of a refusal: %s", text)
		}
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestPathIsItsOwn(t *testing.T) {
	for _, want := range []target{
		{"t", "a@n", "r", "x/y%z", true}, {"t", "a", "r", "..", true}, {"ü", "a/b", "r?", "#", true},
	} {
		got, ok := parsePath(want.path())
		if u, err := url.Parse("http://h" + want.path()); !ok || got != want || err != nil || u.EscapedPath() != want.path() {
			t.Errorf("%+v by %s: %+v %t", want, want.path(), got, ok)
		}
	}
}
