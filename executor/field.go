package executor

// FieldError is an ErrInvalid that says which field of an Input is wrong: tenant, agent, run, id, type, data, in, at,
// correlation, causation or traceparent.
type FieldError struct {
	Field string
	Err   error
}

func (e *FieldError) Error() string   { return ErrInvalid.Error() + " " + e.Field + ": " + e.Err.Error() }
func (e *FieldError) Unwrap() []error { return []error{ErrInvalid, e.Err} }
