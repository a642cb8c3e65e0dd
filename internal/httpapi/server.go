// Package httpapi is what a running process is asked and told over HTTP.
//
// Of every process, operators and their tools read /metrics for Prometheus, /livez (the process answers) and /readyz (it
// does its work, as JSON). Readiness comes from checks that are made when somebody asks, so that it tells of progress and
// not of a start that went well. These are open to everybody who reaches the address: no secrets, no payloads.
//
// A node takes inputs under /v1/, as README.md beside this file has it. A 202 is durable, the same input under the same id
// counts once, its JSON is kept byte for byte, and a client that is slow, silent, or one of too many costs no memory that is
// not bounded. On a loopback address it is open to the programs of this machine, but not to the pages in its browsers; on
// any other it takes a token. It reveals no payload.
package httpapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Server is a listener that answers once Run is called. Who connects before waits.
type Server struct {
	listener net.Listener
	host     string // that was asked for
	log      *slog.Logger
	limits   limits
}

// Listen takes addr (host:port; an empty host is 127.0.0.1). A nil log is quiet.
func Listen(addr string, log *slog.Logger) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	log = log.With("component", "http")
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("listen for HTTP on %q: %w", addr, err)
	}
	if host == "" {
		host = "127.0.0.1" // nobody means to open it to the network by leaving something out
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("listen for HTTP: %s is taken by another program: %w", net.JoinHostPort(host, port), syscall.EADDRINUSE)
	}
	if err != nil {
		return nil, fmt.Errorf("listen for HTTP: %w", err)
	}
	s := &Server{listener: l, host: host, log: log, limits: usualLimits}
	if !s.loopback() {
		log.Warn("metrics and health are open to the network", "addr", s.Addr())
	}
	return s, nil
}

// loopback goes by the address that was bound: a name is what somebody's resolver makes of it.
func (s *Server) loopback() bool {
	addr, err := netip.ParseAddrPort(s.Addr())
	return err == nil && addr.Addr().Unmap().IsLoopback()
}

// Addr is host:port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Close ends a server that never ran.
func (s *Server) Close() error { return s.listener.Close() }

// Run answers until ctx ends, and then returns nil. It returns soon: whoever is still being answered is cut after a second.
// Without in, it takes no inputs.
func (s *Server) Run(ctx context.Context, metrics prometheus.Gatherer, in *Inputs, checks ...Check) error {
	if in != nil && in.Token == nil && !s.loopback() {
		return fmt.Errorf("take inputs on %s, which is open to the network: a token is missing", s.Addr())
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError, // a database that cannot be read must not hide why
		MaxRequestsInFlight: 4,
		Timeout:             10 * time.Second,
	}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { text(w, "ok\n") })
	var asking sync.WaitGroup
	inquirers := make([]*inquirer, len(checks))
	for i, c := range checks {
		inquirers[i] = &inquirer{Check: c, asking: &asking}
	}
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { ready(ctx, w, inquirers) })
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { text(w, "/metrics\n/livez\n/readyz\n") })
	handler := http.Handler(mux)
	if in != nil {
		taking := newInputs(*in, s.host, s.limits, s.log)
		handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasPrefix(r.URL.EscapedPath(), "/v1/") { // the mux would send ids with dots and slashes elsewhere
				taking.ServeHTTP(w, r)
				return
			}
			mux.ServeHTTP(w, r)
		})
	}
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: s.limits.header,
		ReadTimeout:       s.limits.header, // with a body that nobody asked for; read gives inputs more
		WriteTimeout:      s.limits.answer, // from the end of the headers; writeJSON begins anew
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // mostly what strangers send
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(s.listener) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve HTTP on %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := server.Shutdown(last); err != nil {
		_ = server.Close() // cuts them; there is nobody to tell
	}
	asked := make(chan struct{})
	go func() { asking.Wait(); close(asked) }()
	select {
	case <-asked:
	case <-last.Done(): // a check that heeds nothing is left to itself; the process ends
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP on %s: %w", s.Addr(), err)
	}
	return nil
}

func text(w http.ResponseWriter, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = io.WriteString(w, body)
}
