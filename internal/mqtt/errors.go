package mqtt

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/gorilla/websocket"
)

// What ended a connection, or kept it from opening. The relay's rules rest on the first two: only a peer that hung up
// can have been driven away by a record (poison); everything else is an outage.
var (
	// ErrPeerClosed: the broker closed or reset a connection that had been open.
	ErrPeerClosed = errors.New("broker closed the connection")
	// ErrTimeout: this side gave up waiting: no connection, no CONNACK, no SUBACK, no answer to a ping, no progress of a write.
	ErrTimeout = errors.New("broker does not answer in time")
	// ErrUnreachable: no network connection could be opened (refused, no route, unknown name, failed TLS or websocket handshake).
	ErrUnreachable = errors.New("broker unreachable")
	// ErrProtocol: what came from the other side is no MQTT.
	ErrProtocol = errors.New("broken MQTT stream")
	// ErrClosed: this side called Close or Kill.
	ErrClosed = errors.New("connection closed by this side")
	// ErrNoPacketID: 65,535 messages are in flight, the most the protocol can number. The connection is healthy.
	ErrNoPacketID = errors.New("65535 messages in flight, no packet id is free")
	// ErrInFlight is a Delivery's error until it is done.
	ErrInFlight = errors.New("not acknowledged yet")
)

// RefusedError is a CONNACK that refuses.
type RefusedError struct {
	Code byte // the CONNACK return code, 1 to 5 by the standard; some brokers send others
}

func (e *RefusedError) Error() string {
	why, ok := map[byte]string{
		1: "unacceptable protocol version", 2: "client id rejected", 3: "server unavailable",
		4: "bad user name or password", 5: "not authorized",
	}[e.Code]
	if !ok {
		why = "unknown reason"
	}
	return fmt.Sprintf("broker refused the connection: %s (CONNACK code %d)", why, e.Code)
}

// SubscribeError is a SUBACK that does not grant QoS 1 for a filter.
type SubscribeError struct {
	Filter string
	Code   byte // 0x80: refused; 0: granted QoS 0 only, which would lose messages silently
}

func (e *SubscribeError) Error() string {
	if e.Code == 0 {
		return fmt.Sprintf("broker grants %q only QoS 0", e.Filter)
	}
	return fmt.Sprintf("broker refuses the subscription to %q (SUBACK code 0x%02x)", e.Filter, e.Code)
}

// classify adds to an error of an open connection who ended it. The text of a locally closed socket is never passed on:
// paho swallows errors with that text and would not notice that the connection is gone.
func classify(doing string, err error) error {
	var closed *websocket.CloseError
	var timeout net.Error
	switch {
	case errors.Is(err, ErrTimeout), errors.Is(err, ErrClosed), errors.Is(err, ErrPeerClosed):
		return err
	case errors.Is(err, net.ErrClosed):
		return ErrClosed
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return ErrPeerClosed
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.As(err, &closed):
		return fmt.Errorf("%w: %w", ErrPeerClosed, err)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return fmt.Errorf("%w: %s: %w", ErrTimeout, doing, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
