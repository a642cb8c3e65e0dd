// Package devbroker is an MQTT broker in the process, for `postrider dev` and for tests: mochi behind a listener of our
// own, since mochi's races and panics while clients come and go.
//
// What mochi's defaults lose, it keeps: up to 65,535 messages (there are no more packet ids) wait for each kept session,
// at QoS 1, in memory, and come in their order when the session comes back; see sessions.go. What remains: everything is
// gone when the process ends; message 65,536 for an offline session is dropped after its PUBACK (Dropped counts, a Warn
// line says so); messages published while a session is just coming back may overtake the older ones that it still has to
// get; a will may be sorted before messages that were queued earlier; a client that publishes and receives on one kept
// session loses messages. There is no $SYS, and what MQTT 5 does by time (delayed wills, expiry of sessions) does not
// happen. MQTT promises no more to a developer machine, and the fold copes with all of it.
package devbroker

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"syscall"

	mochi "github.com/mochi-mqtt/server/v2"
)

// Broker is a running broker. It accepts everybody: there is no authentication.
type Broker struct {
	server   *mochi.Server
	sessions *sessions
	gate     *gate
	close    sync.Once
}

// Start listens on addr (host:port; an empty host is 127.0.0.1, an empty addr 127.0.0.1:0) and serves until Close.
// A nil log is quiet.
func Start(addr string, log *slog.Logger) (*Broker, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	log = log.With("component", "devbroker")
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("broker address %q: %w", addr, err)
	}
	if host == "" {
		host = "127.0.0.1" // nobody means to open an unprotected broker to the network by leaving something out
	}
	limits := mochi.NewDefaultServerCapabilities()
	limits.MaximumInflight = math.MaxUint16
	limits.ReceiveMaximum = math.MaxUint16
	limits.MaximumClientWritesPending = math.MaxUint16 + 1 // what is in flight fits, so a slow reader loses nothing
	limits.MaximumMessageExpiryInterval = 0                // never; the default drops what is older than a day
	server := mochi.New(&mochi.Options{
		Capabilities:             limits,
		ClientNetReadBufferSize:  16 << 10,
		ClientNetWriteBufferSize: 16 << 10,
		Logger:                   slog.New(slog.DiscardHandler), // it logs payloads
	})
	b := &Broker{server: server, sessions: &sessions{server: server, log: log}}
	if err := server.AddHook(b.sessions, nil); err != nil {
		return nil, fmt.Errorf("start broker: %w", err)
	}
	// server.Serve is not called: its listeners race, and its event loop stops the world every second for $SYS and sorts
	// all that waits in all sessions.
	b.gate = newGate(net.JoinHostPort(host, port), func(c net.Conn) { _ = server.EstablishConnection("gate", c) })
	if err := b.Up(); err != nil {
		b.Close()
		return nil, err
	}
	log.Info("broker listening", "addr", b.Addr())
	if ip := net.ParseIP(host); host != "localhost" && !ip.IsLoopback() {
		log.Warn("broker is open to the network and asks nobody for a password", "addr", b.Addr())
	}
	return b, nil
}

// Addr is host:port, also while down.
func (b *Broker) Addr() string { return b.gate.address() }

// URL is the address as clients take it.
func (b *Broker) URL() string { return "tcp://" + b.Addr() }

// Dropped counts the messages that were acknowledged to their sender and dropped for a receiver.
func (b *Broker) Dropped() int64 { return b.sessions.total() }

// Down refuses new connections and cuts all there are. Kept sessions stay. It returns when nothing is served any more.
func (b *Broker) Down() { b.gate.down(false) }

// Up listens on the same port again.
func (b *Broker) Up() error {
	err := b.gate.up()
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("broker: %s is taken by another program: %w", b.Addr(), err)
	}
	if err != nil {
		return fmt.Errorf("broker: %w", err)
	}
	return nil
}

// Close ends the broker and forgets its sessions. Closing again is fine.
func (b *Broker) Close() {
	b.close.Do(func() {
		b.gate.down(true) // mochi's own way panics when clients come meanwhile, and hangs on one that does not read
		_ = b.server.Close()
	})
}
