/* What program.c, which makes programs, and run.c, which runs them, share. */

#ifndef FUSEDMLP_PROGRAM_H
#define FUSEDMLP_PROGRAM_H

#include "launcher.h"

enum { MAX_VALUES = 96, MAX_STEPS = 128, MAX_CALL_ARGUMENTS = 16, MAX_RESULTS = 8 };

typedef enum { CALL, TAKE, GIVE, DROP, LAUNCH } Kind;

typedef struct {
    Kind kind;
    int value, first, count; /* of TAKE, GIVE and DROP; of LAUNCH; of CALL: how many results, from results[0] on */
    PyObject *function, *arguments, *keywords; /* of CALL; keywords NULL where there are none */
    PyObject *places, *named; /* tuples of (position, value) and (keyword, value) to fill in */
    PyObject *bytes;          /* of TAKE */
    int results[MAX_RESULTS];
} Step;

typedef struct {
    int values[2];
    uint64_t offsets[2];
    int pair;
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *plan, *steps_kept, *kept; /* the Plan; the steps, which hold every object of theirs; what must live on */
    int input_count, value_count, slot_count, step_count, output_count, single;
    Slot slots[MAX_ARGUMENTS];
    int outputs[MAX_VALUES]; /* -1: None */
    Step *steps;
} Program;

#endif
