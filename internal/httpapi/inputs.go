package httpapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"postrider/executor"
	"postrider/internal/record"
)

// ErrNotReady: the node has only just started, and does not know its agents yet.
var ErrNotReady = errors.New("the node has only just started")

// Node is what the inputs API asks of a node.
type Node interface {
	// Submit stores an input and returns once it is durable; its step begins soon. Errors: those of executor.Submit, and
	// ErrNotReady.
	Submit(ctx context.Context, in executor.Input) (executor.Submitted, error)
	// FindInput errors: those of executor.FindInput.
	FindInput(ctx context.Context, tenant, run, id string) (executor.InputInfo, error)
}

// Inputs is what a server of a node's inputs needs.
type Inputs struct {
	Node  Node
	Token *Token // that clients have to show; nil: none, which takes a loopback address
}

// maxBody is the most data that an input may have. TestLargestInput.
const maxBody = 8 << 20

// limits are bounds of a server; all but header are of the inputs API.
type limits struct {
	header   time.Duration // for all of a request without a body
	answer   time.Duration // to make one, and for the client to read it
	requests int64         // being answered at once
	bytes    int64         // of bodies in hand at once
	silence  time.Duration // of a client within its body
	body     time.Duration // for all of a body
	store    time.Duration // for a place in a transaction, or a look at an input
}

// usualLimits let the largest body come at 28 KB/s, and take 64 MiB for bodies at most.
var usualLimits = limits{
	header: 5 * time.Second, answer: 20 * time.Second, requests: 256, bytes: 64 << 20, silence: 10 * time.Second, body: 5 * time.Minute, store: 30 * time.Second,
}

// inputs answers everything under /v1/.
type inputs struct {
	Inputs
	limits
	host string // that was given to listen on
	log  *slog.Logger

	requested, held atomic.Int64  // of limits.requests and limits.bytes
	looks           chan struct{} // one for each look at an input: it reads the data too, and readers are few
	warned          atomic.Int64  // when, in Unix seconds
}

func newInputs(in Inputs, host string, l limits, log *slog.Logger) *inputs {
	return &inputs{Inputs: in, limits: l, host: host, log: log, looks: make(chan struct{}, 4)}
}

func (i *inputs) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p := i.answer(w, r)
	if p == nil {
		return
	}
	if p.Status >= 500 && r.Context().Err() == nil {
		i.warn(p)
	}
	i.log.Debug("request refused", "code", p.Status, "field", p.Field)
	p.write(w)
}

// warn says at most once a minute that clients are sent away.
func (i *inputs) warn(p *problem) {
	now, last := time.Now().Unix(), i.warned.Load()
	if now-last >= 60 && i.warned.CompareAndSwap(last, now) {
		i.log.Warn("inputs are not taken", "code", p.Status, "reason", cmp.Or(p.reason, reasonOther))
	}
}

// answer answers, or says why not.
func (i *inputs) answer(w http.ResponseWriter, r *http.Request) *problem {
	if reason := foreign(r, i.host); reason != "" {
		return newProblem(http.StatusForbidden, "%s", reason)
	}
	if !i.Token.allows(r.Header) {
		w.Header().Set("WWW-Authenticate", `Bearer realm="postrider"`)
		return newProblem(http.StatusUnauthorized, "Authorization: Bearer TOKEN is missing, or has another token")
	}
	t, ok := parsePath(r.URL.EscapedPath())
	if !ok {
		return newProblem(http.StatusNotFound, "there is no such path")
	}
	if i.requested.Add(1) > i.requests {
		i.requested.Add(-1)
		return tryLater(reasonFlood, time.Second, "more than %d requests are being answered", i.requests)
	}
	defer i.requested.Add(-1)
	switch {
	case !t.one && r.Method == http.MethodPost:
		return i.post(w, r, t)
	case !t.one:
		w.Header().Set("Allow", "POST")
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		return i.get(w, r, t)
	default:
		w.Header().Set("Allow", "GET, HEAD")
	}
	return newProblem(http.StatusMethodNotAllowed, "there is only %s", w.Header().Get("Allow"))
}

// target is what a path names: the inputs of a run, of a new run, or one input.
type target struct {
	tenant, agent string
	run           string // "" of a new one
	id            string
	one           bool
}

// parsePath takes a path apart before it is unescaped: an id may have slashes, percent signs and dots.
func parsePath(escaped string) (t target, ok bool) {
	s := strings.Split(escaped, "/")
	for i := range s {
		var err error
		if s[i], err = url.PathUnescape(s[i]); err != nil {
			return t, false
		}
	}
	if len(s) < 7 || s[0] != "" || s[1] != "v1" || s[2] != "tenants" || s[4] != "agents" {
		return t, false
	}
	t.tenant, t.agent = s[3], s[5]
	switch s = s[6:]; {
	case len(s) == 1 && s[0] == "inputs":
		return t, true
	case len(s) < 3 || len(s) > 4 || s[0] != "runs" || s[1] == "" || s[2] != "inputs":
		return t, false
	}
	t.run = s[1]
	if len(s) == 4 {
		t.id, t.one = s[3], true
	}
	return t, !t.one || t.id != ""
}

// path is the one name of an input.
func (t target) path() string {
	id := url.PathEscape(t.id)
	if id == "." || id == ".." { // a client would resolve them
		id = strings.ReplaceAll(id, ".", "%2E")
	}
	return "/v1/tenants/" + url.PathEscape(t.tenant) + "/agents/" + url.PathEscape(t.agent) + "/runs/" + url.PathEscape(t.run) + "/inputs/" + id
}

func (i *inputs) post(w http.ResponseWriter, r *http.Request, t target) (p *problem) {
	in := executor.Input{Tenant: t.tenant, Agent: t.agent, Run: t.run, Type: "message", Source: "http", Trace: traceparent(r.Header)}
	if p := checkContent(r.Header); p != nil {
		return p
	}
	if in.ID, p = inputID(r.Header); p != nil {
		return p
	}
	if p := parameters(r.URL.RawQuery, &in); p != nil {
		return p
	}
	size := r.ContentLength
	if size > maxBody {
		return tooLarge()
	}
	if size < 0 {
		size = maxBody // chunked: only the end tells
	}
	if i.held.Add(size) > i.bytes {
		i.held.Add(-size)
		return tryLater(reasonFlood, time.Second, "more than %d bytes are being taken in", i.bytes)
	}
	defer i.held.Add(-size)
	if in.Data, p = i.read(w, r); p != nil {
		w.Header().Set("Connection", "close") // what comes next is the rest of a body
		return p
	}
	ctx, cancel := context.WithTimeout(r.Context(), i.store)
	defer cancel()
	out, err := i.Node.Submit(ctx, in)
	if err != nil {
		i.log.Debug("input not stored", "err", err)
		return problemOf(err)
	}
	t.run, t.id = out.Run, out.ID
	w.Header().Set("Location", t.path())
	writeJSON(w, http.StatusAccepted, "application/json", out)
	return nil
}

// read takes a body in, of a client that may be slow, but not silent.
func (i *inputs) read(w http.ResponseWriter, r *http.Request) (b []byte, p *problem) {
	body := &patient{Reader: r.Body, c: http.NewResponseController(w), silence: i.silence, end: time.Now().Add(i.body)}
	var err error
	if r.ContentLength >= 0 {
		b = make([]byte, r.ContentLength)
		_, err = io.ReadFull(body, b)
	} else {
		b, err = io.ReadAll(http.MaxBytesReader(w, io.NopCloser(body), maxBody))
	}
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, tooLarge()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, newProblem(http.StatusRequestTimeout, "the body did not come in time")
	case err != nil:
		return nil, badField("data", "the body ends too early, or is no HTTP")
	}
	return b, nil
}

func tooLarge() *problem {
	p := newProblem(http.StatusRequestEntityTooLarge, "data: an input has at most %d bytes", maxBody)
	p.Field = "data"
	return p
}

// patient moves the deadline of a connection with each read. At the end of the body net/http takes it away.
type patient struct {
	io.Reader
	c       *http.ResponseController
	silence time.Duration
	end     time.Time
}

func (p *patient) Read(b []byte) (int, error) {
	deadline := time.Now().Add(p.silence)
	if deadline.After(p.end) {
		deadline = p.end
	}
	if err := p.c.SetReadDeadline(deadline); err != nil {
		return 0, err
	}
	return p.Reader.Read(b)
}

// checkContent wants JSON in UTF-8, as it is.
func checkContent(h http.Header) *problem {
	kinds := h.Values("Content-Type")
	if len(kinds) == 1 {
		kind, params, err := mime.ParseMediaType(kinds[0])
		charset, has := params["charset"]
		plain := len(params) == 0 || len(params) == 1 && has && strings.EqualFold(charset, "utf-8")
		if err == nil && kind == "application/json" && plain && h.Get("Content-Encoding") == "" {
			return nil
		}
	}
	p := newProblem(http.StatusUnsupportedMediaType, "Content-Type must be application/json, in UTF-8, without a Content-Encoding")
	p.Field = "Content-Type"
	return p
}

const keyHeader = "Idempotency-Key"

// inputID is what Idempotency-Key says: the id as it is, or in quotes, with \ before quotes and backslashes within. "": none
// was given.
func inputID(h http.Header) (string, *problem) {
	keys := h.Values(keyHeader)
	if len(keys) == 0 {
		return "", nil
	}
	if len(keys) > 1 {
		return "", badField(keyHeader, "is given more than once")
	}
	id := keys[0]
	if inside, quoted := strings.CutPrefix(id, `"`); quoted {
		id = ""
		for {
			n := strings.IndexAny(inside, `"\`)
			if n < 0 || inside[n] == '\\' && (n+1 == len(inside) || inside[n+1] != '"' && inside[n+1] != '\\') {
				return "", badField(keyHeader, "the quoted string does not end, or has a backslash before something else than a quote or a backslash")
			}
			id += inside[:n]
			if inside[n] == '"' {
				inside = inside[n+1:]
				break
			}
			id += inside[n+1 : n+2]
			inside = inside[n+2:]
		}
		if inside != "" {
			return "", badField(keyHeader, "something follows the quoted string")
		}
	}
	if id == "" {
		return "", badField(keyHeader, "is empty; left out, it stands for a new one")
	}
	return id, nil
}

// parameters reads the query.
func parameters(query string, in *executor.Input) *problem {
	values, err := url.ParseQuery(query)
	if err != nil {
		return newProblem(http.StatusBadRequest, "the query is malformed")
	}
	for name, v := range values {
		if name != "type" && name != "in" && name != "at" {
			return badField(cut(name), "is no parameter; there are type, in and at")
		}
		if len(v) > 1 {
			return badField(name, "is given more than once")
		}
	}
	if values.Has("type") {
		in.Type = values.Get("type")
	}
	if values.Has("in") {
		if in.In, err = time.ParseDuration(values.Get("in")); err != nil {
			return badField("in", "is not a duration such as 5m")
		}
		if in.In < 0 {
			return badField("in", "is negative")
		}
	}
	if values.Has("at") {
		given, plus := values.Get("at"), ""
		if strings.Contains(given, " ") {
			plus = " (a + is %2B in a query)"
		}
		if in.AtUS, err = executor.ParseTime(given); err != nil {
			return badField("at", "%s%s", err, plus)
		}
		if values.Has("in") {
			return badField("at", "in and at exclude each other")
		}
	}
	return nil
}

// cut shortens what somebody made up.
func cut(s string) string {
	if len(s) > 64 {
		return strings.ToValidUTF8(s[:64], "") + "…"
	}
	return s
}

// traceparent is the W3C trace context of a request; "" if it has none, or one that is to be ignored: more than one,
// malformed, all zeros. A later version than 00 is read, and carried on, as 00.
func traceparent(h http.Header) string {
	given := h.Values("Traceparent")
	if len(given) != 1 || len(given[0]) < 55 {
		return ""
	}
	s := given[0]
	version, trace, parent, flags := s[:2], s[3:35], s[36:52], s[53:55]
	if s[2] != '-' || s[35] != '-' || s[52] != '-' || !isHex(version) || !isHex(trace) || !isHex(parent) || !isHex(flags) ||
		version == "ff" || strings.Trim(trace, "0") == "" || strings.Trim(parent, "0") == "" ||
		len(s) > 55 && (version == "00" || s[55] != '-') {
		return ""
	}
	return "00" + s[2:55]
}

func isHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }

// seenInput is an input as the API shows it, with the names that `inbox ls -o json` has: where it stands, and not what it
// says. Times are RFC 3339 in UTC with microseconds, null for none. Reason and LastError may quote an agent's stderr or
// state: they are for who has a token.
type seenInput struct {
	Tenant      string  `json:"tenant"`
	Run         string  `json:"run"`
	Agent       string  `json:"agent"`
	Node        string  `json:"node"`
	ID          string  `json:"id"`
	Type        string  `json:"type"`
	Source      string  `json:"source"`
	State       string  `json:"state"`
	Reason      *string `json:"reason,omitempty"`
	Attempts    int64   `json:"attempts"`
	LastError   *string `json:"last_error,omitempty"`
	NextTryAt   *string `json:"next_try_at"`
	ArrivedAt   *string `json:"arrived_at"`
	DueAt       *string `json:"due_at"`
	ExpiresAt   *string `json:"expires_at"`
	EndedAt     *string `json:"ended_at"`
	Branch      string  `json:"branch"`
	Step        int64   `json:"step"`
	Hops        int64   `json:"hops"`
	Correlation string  `json:"correlation"`
	Causation   string  `json:"causation"`
	Traceparent string  `json:"traceparent"`
}

func (i *inputs) get(w http.ResponseWriter, r *http.Request, t target) *problem {
	if r.URL.RawQuery != "" {
		return newProblem(http.StatusBadRequest, "there are no parameters")
	}
	ctx, cancel := context.WithTimeout(r.Context(), i.store)
	defer cancel()
	select {
	case i.looks <- struct{}{}:
		defer func() { <-i.looks }()
	case <-ctx.Done():
		return problemOf(ctx.Err())
	}
	in, err := i.Node.FindInput(ctx, t.tenant, t.run, t.id)
	if err != nil {
		i.log.Debug("input not found", "err", err)
		return problemOf(err)
	}
	if name, node, _ := strings.Cut(t.agent, "@"); in.Agent != name || node != "" && in.Node != "" && in.Node != node {
		return problemOf(fmt.Errorf("%w: agent %s has no such input", executor.ErrNotFound, cut(t.agent)))
	}
	out := seenInput{
		Tenant: in.Tenant, Run: in.Run, Agent: in.Agent, Node: in.Node, ID: in.ID, Type: in.Type, Source: in.Source, State: in.State,
		Attempts: in.Attempts, NextTryAt: stamp(in.NextUS), ArrivedAt: stamp(in.ArrivedUS),
		DueAt: stamp(in.DueUS), ExpiresAt: stamp(in.ExpiresUS), EndedAt: stamp(in.EndedUS), Branch: in.Branch, Step: in.Step, Hops: in.Hops,
		Correlation: in.Correlation, Causation: in.Causation, Traceparent: in.Trace,
	}
	if i.Token != nil {
		out.Reason, out.LastError = &in.Reason, &in.LastError
	}
	writeJSON(w, http.StatusOK, "application/json", out)
	return nil
}

func stamp(us int64) *string {
	if us == 0 {
		return nil
	}
	s := string(record.AppendTime(nil, us))
	return &s
}
